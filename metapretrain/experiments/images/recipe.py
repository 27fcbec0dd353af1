"""The recipe of an image experiment: every choice but the method and the seed."""

from dataclasses import dataclass, field

from metapretrain.checks import number, whole
from metapretrain.data.augment import AUGMENTATIONS
from metapretrain.errors import one_of
from metapretrain.experiments.recipe import PhaseTerms, Proto
from metapretrain.models import ENCODERS, STEMS


@dataclass(frozen=True)
class ImagePhase(PhaseTerms):
    """How one phase of training is done; the terms are those of :class:`metapretrain.training.TrainSettings`.

    `augment` names a preset of :data:`metapretrain.data.augment.AUGMENTATIONS`.
    """

    lr: float
    augment: str = "none"
    optimizer: str = "sgd"
    weight_decay: float = 5e-4
    schedule: str = "cosine"
    warmup: float = 0.05
    label_smoothing: float = 0.0
    ema: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("augmentation", self.augment, AUGMENTATIONS)


@dataclass(frozen=True)
class ImageRecipe:
    """Choices of an image experiment.

    Args:
        epochs: the budget: encoder passes a training image, pretraining and fine-tuning together.
        pretrain_share: share of the budget that pretraining gets, in (0, 1); batch_size: images per batch.
        encoder: name for :func:`metapretrain.models.build_encoder`; stem: of a ResNet.
        validation: images of the training set that no seed trains on.
        balanced: the same number of images of each class in a batch.
        supervised, prl, simclr: the phase of each objective; `frozen` and `unfrozen`: of fine-tuning.
        proto: of the prototypical loss; simclr_temperature: of the contrastive loss.
        joint_weight: of the prototypical loss beside cross entropy, in (0, 1), where a row has both.
        scheduler: of rows whose encoder is pretrained by several objectives, one an update: see
            :func:`metapretrain.scheduling.parse_schedule`.
    """

    epochs: int
    pretrain_share: float
    batch_size: int
    encoder: str
    supervised: ImagePhase
    prl: ImagePhase
    simclr: ImagePhase
    frozen: ImagePhase
    unfrozen: ImagePhase
    proto: Proto = field(default_factory=Proto)
    stem: str = "standard"
    validation: int = 500
    balanced: bool = False
    simclr_temperature: float = 0.5
    scheduler: str = ""
    joint_weight: float = 0.5

    def __post_init__(self) -> None:
        one_of("encoder", self.encoder, ENCODERS)
        one_of("stem", self.stem, STEMS)
        for name, least in (("epochs", 1), ("batch_size", 2), ("validation", 0)):
            whole(name, getattr(self, name), least)
        for share in ("pretrain_share", "joint_weight"):
            number(share, getattr(self, share), above=0, below=1)
        number("simclr_temperature", self.simclr_temperature, above=0)
