"""The model of any finished run: images, few-shot learners, texts and prompts."""

import csv
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from metapretrain.checks import check_alike, check_device, decisive
from metapretrain.data.tables import read_texts
from metapretrain.data.texts import TextSet, TextTask
from metapretrain.data.tokens import tokenize
from metapretrain.errors import InputError, one_of
from metapretrain.evaluation.metrics import temperature
from metapretrain.experiments.text.data import read_rows, write_table
from metapretrain.experiments.text.objectives import Output, added, build_heads, prototype_outputs
from metapretrain.experiments.text.recipe import TextMethod, TextPretraining, TextRecipe, one_sequence, ordinal_terms
from metapretrain.experiments.text.training import embed_tokens
from metapretrain.files import check_sums, load_tensors, read_json
from metapretrain.models.pretrained import image_encoder
from metapretrain.models.saved import ENCODER as IMAGE_ENCODER
from metapretrain.models.saved import LEARNER, Saved, SavedLearner, SavedModel, build_described
from metapretrain.models.saved import load as load_images
from metapretrain.models.text_encoders import TextEncoder, build_text_encoder, load_text_encoder
from metapretrain.prompts import PromptedModel, SoftPrompt
from metapretrain.prompts.soft_prompt import CONFIG, OURS
from metapretrain.prompts.template import SECOND

logger = logging.getLogger(__name__)

PROMPTS = "prompts"  # the folder of a run that holds an adapter for each set


def predict_with_prompts(
    run: str | Path,
    tables: Mapping[str, Path],
    out: str | Path | None,
    device: str | torch.device,
    model: str | None,
    table: Mapping[str, Any] | None,
    held: Mapping[str, Path] | None,
) -> list[Path]:
    """:func:`predict_files` with a run's prompts, or with one prompt alone, which is for tables of any name."""
    run = Path(run)
    check_sums(run)
    alone = (run / OURS).is_file()
    known = list(tables) if alone else sorted(path.name for path in (run / PROMPTS).iterdir() if path.is_dir())
    name = model if model is not None else _base_of(run, alone)
    for of in tables:
        one_of("set of the run", of, known)
    from metapretrain.models.language_models import load_language_model

    net, tokenizer = load_language_model(name)
    net = net.to(check_device(str(device)))
    written = []
    for of, file in tables.items():
        folder = run if alone else run / PROMPTS / of
        prompted = PromptedModel.load(folder, net, tokenizer)
        pairs = SECOND in prompted.template.text
        words, prompt = prompted.verbalizer.words, SoftPrompt.from_adapter(folder).weight
        about = Output(of, "pair-classification" if pairs else "classification", words, 0.0, 1.0, len(words))

        def logits(rows: TextSet, prompted: PromptedModel = prompted, prompt: Tensor = prompt) -> Tensor:
            return prompted.classify(prompt, rows.first, rows.second).log()

        path = (run / "own-texts" if out is None else Path(out)) / f"{of}.csv"
        written.append(_write(path, about, _rows(about, file, table), logits, table, held))
    return written


def _rows(about: Output, file: Path, table: Mapping[str, Any] | None) -> TextSet:
    """The rows of a table of a task; labels, where `table` names their column, are classes or scores of the task."""
    known: dict[str, Any] = {}
    if (table or {}).get("label") is not None:
        known = {"low": about.low, "high": about.high} if about.regression else {"classes": about.classes}
    return read_rows(about.name, file, about.kind, {**(table or {}), **known})


def _write(
    path: Path,
    about: Output,
    rows: TextSet,
    logits: Callable[[TextSet], Tensor],
    table: Mapping[str, Any] | None,
    held: Mapping[str, Path] | None,
) -> Path:
    """Write predictions; with `held` probabilities too, at the temperature that fits its table."""
    found = decisive(logits(rows))
    if about.regression:
        return write_table(path, rows, found)
    if held is None:
        return write_table(path, rows, found.argmax(1))
    heat = 1.0
    if about.name in held:
        known = _rows(about, held[about.name], {"label": "label", **(table or {})})
        heat = temperature(logits(known), known.require_labels())
        logger.info("%s: temperature %.3g, fitted to %d rows", about.name, heat, len(known))
    shares = (found.double() / heat).softmax(1)
    return write_table(path, rows, found.argmax(1), dict(zip(about.classes, shares.unbind(1), strict=True)))


def _base_of(run: Path, alone: bool) -> str:
    """The language model that a run or a prompt is for."""
    file = run / (CONFIG if alone else "config.json")
    try:
        about = read_json(file) or {}
        name = about["base_model_name_or_path"] if alone else about["config"]["choices"]["model"]
    except (LookupError, TypeError):
        name = None
    if not isinstance(name, str):
        raise InputError(f"{file} names no language model that the prompts are for; name it (--model)")
    return name


ENCODER, HEADS, PROTOTYPES = "encoder", "heads.safetensors", "prototypes.safetensors"


def describe(tasks: Sequence[TextTask], method: TextMethod | TextPretraining, recipe: TextRecipe) -> dict[str, Any]:
    """What a saved model is built again from, as JSON values."""
    outputs = [{name: getattr(task, name) for name in Output.__dataclass_fields__} for task in tasks]
    own = {"kind": "text", "heads": isinstance(method, TextMethod), **asdict(method)}
    if (ordinal := ordinal_terms(method, recipe)) is not None:
        own["ordinal"] = ordinal
    return {**own, "sts_head": recipe.sts_head, "max_length": recipe.max_length, "tasks": outputs}


class SavedTextModel(Saved):
    """The encoder of a finished run with its heads, or its prototypes where it has no head for a task.

    `outputs` is what it predicts, by the task's name; `joined`: whether its pairs are one sequence.
    """

    def __init__(self, encoder: TextEncoder, model: Mapping[str, Any], folder: Path) -> None:
        super().__init__()
        self.encoder = encoder
        plan = TextPretraining(joined=bool(model["joined"]), sts=model.get("sts"))
        self.limit = min(int(model["max_length"]), encoder.max_length)
        found = [Output(**{**about, "classes": tuple(about["classes"])}) for about in model["tasks"]]
        self.outputs = {output.name: output for output in found}
        self.joined = {output.name: one_sequence(plan, output.kind) for output in found}
        self.heads, self.prototypes = nn.ModuleDict(), load_tensors(folder / PROTOTYPES)
        self.ordinal: dict[str, Any] | None = model.get("ordinal")
        if model["heads"]:
            fields = TextMethod.__dataclass_fields__
            method = TextMethod(**{name: value for name, value in model.items() if name in fields})
            self.heads = build_heads(found, method, model["sts_head"], encoder.features)
            if list(self.heads.parameters()):
                self.heads.load_state_dict(load_tensors(folder / HEADS))

    def encode(
        self, texts: Sequence[str] | Sequence[tuple[str, str]], batch_size: int = 64, *, progress: bool = False
    ) -> Tensor:
        """Return embeddings float32 (N, D) of sentences, or of pairs as one sequence each; `progress` shows a bar."""
        return self.encoder.encode(texts, batch_size, progress=progress)

    def network(self) -> tuple[nn.Module, Callable[[Any], Any]]:
        """The encoder, and what makes its input of texts."""
        return self.encoder.network()

    def predict(self, task: str, texts: TextSet) -> Tensor:
        """Return classes int64 (N,) or scores float32 (N,) for the rows of `texts`; see :meth:`logits`."""
        found = decisive(self.logits(task, texts))
        return found.argmax(1) if found.ndim > 1 else found

    @torch.no_grad()
    def logits(self, task: str, texts: TextSet) -> Tensor:
        """Return logits (N, C), or scores float32 (N,) of a regression, for the rows of `texts`; no label is read.

        Without a head: negative squared distances to the prototypes. Of scores the nearest one's, or after an ordinal
        pretraining (of this version on) the expected score, by which `result.json` has its correlations.
        InputError: a task that the run has not, or pairs where it has single sentences.
        """
        output = self.outputs[one_of("task of the run", task, self.outputs)]
        if not isinstance(texts, TextSet):
            raise InputError(f"predict takes a TextSet as read_texts returns it, not a {type(texts).__name__}")
        if texts.pairs != output.kind.startswith("pair"):
            raise InputError(f"{task} takes {'pairs of sentences' if not texts.pairs else 'single sentences'}")
        if not len(texts):
            return torch.zeros(0) if output.regression else torch.zeros(0, output.num_classes)
        tokens = tokenize(texts, self.encoder.tokenizer, max_length=self.limit, joined=self.joined[task], name=task)
        z = embed_tokens(self.encoder, tokens, next(self.encoder.parameters()).device, self.limit)
        if task in self.heads:
            found: Tensor = self.heads[task](*z).float().cpu()
            one = found.ndim == 1 and not output.regression  # a logit of class 1 of two
            return torch.stack([torch.zeros_like(found), found], 1) if one else found
        centres = self.prototypes[task].to(z[0].device)
        return prototype_outputs(output, added(z), centres, self.ordinal)


def load_text_model(run: str | Path, device: str | torch.device = "cpu") -> SavedTextModel:
    """Load the model of a finished text run; no code from the folder is run.

    InputError: no run there, a run that has not finished or has no weights, or weights of another model or run.
    """
    folder = Path(run)
    file = folder / "config.json"
    check_sums(folder)
    config = read_json(file)
    if config is None:
        raise InputError(f"{folder} is not a run folder: it has no config.json; name one below runs/")
    described = config.get("config")
    model = described.get("model") if isinstance(described, dict) else None
    if not isinstance(model, dict) or model.get("kind") != "text":
        told = f"{folder} is no run of texts by its config.json; give one of run_text.py, or one of run_prompts.py that"
        raise InputError(f"{told} tuned a prompt, or images to a run of images")
    if not (folder / PROTOTYPES).is_file():
        raise InputError(f"{folder} has not finished: it has no {PROTOTYPES}; continue it with --resume")
    encoder = load_text_encoder(folder / ENCODER)
    saved = build_described(file, lambda: SavedTextModel(encoder, model, folder))
    return saved.to(check_device(str(device))).eval().requires_grad_(False)


def content_of(run: str | Path) -> str:
    """Return what a run folder holds: `prompts` (or one prompt), a model of `texts`, or one of `images`.

    A folder that cannot be read is one of `images`, whose reader says what is wrong.
    """
    folder = Path(run)
    if (folder / "prompts").is_dir() or (folder / "prompt.json").is_file():
        return "prompts"
    try:
        config = (read_json(folder / "config.json") or {}).get("config")
    except InputError:
        return "images"
    model = config.get("model") if isinstance(config, dict) else None
    return "texts" if isinstance(model, dict) and model.get("kind") == "text" else "images"


def refuse_trial(run: str | Path) -> None:
    """Refuse a row of a table with --validate that keeps no model."""
    folder = Path(run)
    if any((folder / name).exists() for name in (IMAGE_ENCODER, LEARNER, PROTOTYPES, PROMPTS)):
        return
    if (read_json(folder / "result.json") or {}).get("kind") == "tuning":
        how = "run it again without --validate, with another --out or --tag"
        raise InputError(f"{folder} was run with --validate, which keeps no model of such a row; {how}")


def load(run: str | Path, device: str | torch.device = "cpu") -> SavedModel | SavedLearner | SavedTextModel:
    """Load the model of a finished run folder; no code from the folder is run (safetensors and JSON only).

    It is in evaluation mode: that of :func:`metapretrain.models.saved.load` for images, or a :class:`SavedTextModel`.
    InputError: no run there, a run that has not finished, or weights that are missing, damaged or another model's.

    Example:
        >>> load("no-such-run")
        Traceback (most recent call last):
        ...
        metapretrain.errors.InputError: no-such-run is not a run folder: ...
    """
    if not isinstance(run, str | Path):
        raise InputError(f"a run is named by its folder, not by a {type(run).__name__}; name one below runs/")
    refuse_trial(run)
    return load_text_model(run, device) if content_of(run) == "texts" else load_images(run, device)


def load_encoder(name: str | Path, device: str | torch.device = "cpu", *, texts: bool = False) -> Any:
    """The encoder of a finished run, or a pretrained one, with `encode` and `adapt`.

    `name`: a run's folder; for images also what :func:`metapretrain.models.pretrained.image_encoder` takes, for texts
    what :func:`metapretrain.models.text_encoders.build_text_encoder` takes.

    InputError: nothing of that name, or a run of texts where images are wanted, or the other way round.
    """
    folder = Path(name)
    described = (read_json(folder / "config.json") or {}) if (folder / "config.json").is_file() else {}
    named = str(name).startswith(("timm:", "torchvision:")) or (not folder.exists() and str(name).count("/") == 1)
    if "config" in described or not (described or named or (texts and not folder.exists())):
        if (of_texts := content_of(folder) == "texts") != texts:
            said = "is a run of texts: give --texts FILE" if of_texts else "is no run of texts: give images"
            raise InputError(f"{name} {said}")
        return load(folder, device)
    if texts:
        return build_text_encoder(str(name)).to(check_device(str(device))).eval().requires_grad_(False)
    return image_encoder(name, device)


def predict_files(
    run: str | Path,
    tables: Mapping[str, Path],
    out: str | Path | None = None,
    device: str | torch.device = "cpu",
    *,
    model: str | None = None,
    table: Mapping[str, Any] | None = None,
    held: Mapping[str, Path] | None = None,
) -> list[Path]:
    """Predict the rows of tables of texts with a finished run; write `TASK.csv` for each and return the paths.

    Args:
        run: the folder of the run, or of a saved prompt.
        tables: by the task's name, a table with the columns `id` and `sentence`, or `sentence1` and `sentence2`.
        out: where the predictions go; None: `predictions` in the run's folder, `own-texts` in that of prompts.
        model: of prompts, the language model that they are for; None: the one that the run or the prompt names.
        table: how the tables are read: options of :func:`metapretrain.data.tables.read_texts`, such as other columns;
            with `label` their labels are written too.
        held: write probabilities of classes; by the task's name, a table with labels that was used for nothing else, to
            which a temperature is fitted (Guo et al., 2017). {}: as they are.

    InputError: no model of texts there; a task that the run has not; a table that cannot be read (see
        :func:`metapretrain.data.tables.read_texts`); no `out`, and the folder has predictions for other rows.
    """
    refuse_trial(run)
    for name in held or {}:
        one_of("task that is predicted", name, tables)
    if content_of(run) == "prompts":
        return predict_with_prompts(run, tables, out, device, model, table, held)
    if model is not None:
        raise InputError(f"{run} has no prompts, whose language model --model would name; leave it out")
    saved = load_text_model(run, device)
    known = {task: saved.outputs[one_of("task of the run", task, saved.outputs)] for task in tables}
    read = {task: _rows(known[task], file, table) for task, file in tables.items()}
    folder = Path(run) / "predictions" if out is None else Path(out)
    for task, rows in read.items() if out is None else ():  # a run keeps those for its own test files
        if (path := folder / f"{task}.csv").is_file():
            with path.open(newline="", encoding="utf-8") as stream:
                if [row.get("id") for row in csv.DictReader(stream)] != rows.ids:
                    raise InputError(f"{path} has predictions for other rows; name another folder for these (--out)")
    return [
        _write(folder / f"{task}.csv", known[task], rows, partial(saved.logits, task), table, held)
        for task, rows in read.items()
    ]


def read_classes(file: str | Path, label: str, table: Mapping[str, Any] | None = None) -> TextSet:
    """Read texts of the classes that the column `label` names, in sorted order; rows that name none are left out.

    `table`: options of :func:`metapretrain.data.tables.read_texts`; the column of the texts is `sentence` otherwise.
    InputError: as there, or no row names a class, or the classes are a text or named in `table`.
    """
    how = {"text": "sentence", **(table or {})}
    if wrong := sorted({"id", "label"} & how.keys()) or [name for name in ("text", "pair") if how.get(name) == label]:
        raise InputError(f"--table {wrong[0]}={how[wrong[0]]}: the classes' column is given by --label alone")
    try:
        rows = read_texts(file, **how, id=label)
    except InputError as error:
        if "unknown column" not in str(error):
            raise
        told = "--table text=COLUMN names the texts' column (default: sentence), --label the classes' (default: label)"
        raise InputError(f"{str(error).replace('allowed:', 'the table has')}; {told}") from None
    kept = [row for row, name in enumerate(rows.ids) if name.strip()]
    if not kept:
        raise InputError(f"{file}: no row names a class in column {label!r}")
    if len(kept) < len(rows):
        logger.warning("%s: %d rows name no class and are left out", file, len(rows) - len(kept))
    rows = rows.subset(kept)
    classes = tuple(sorted({name.strip() for name in rows.ids}))
    check_alike(f"{file}, column {label!r}", classes)
    codes = torch.tensor([classes.index(name.strip()) for name in rows.ids])
    return replace(rows, labels=codes, classes=classes)
