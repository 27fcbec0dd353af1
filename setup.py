"""Metadata and dependencies of metapretrain; tool settings are in pyproject.toml."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent


def version() -> str:
    """The one place of the version is `metapretrain/__init__.py`."""
    text = (HERE / "metapretrain" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"', text, re.MULTILINE)
    assert found, "metapretrain/__init__.py has no __version__"
    return found.group(1)


# The tests pass with the oldest version of each that is allowed here, all together (Python 3.11).
CORE = [
    "torch>=2.7,<3",  # 2.7 is the first that compiles a model of transformers 5
    "torchvision>=0.22,<1",  # pairs with torch 2.7; ResNet, data readers, reference operations
    "transformers>=5.17,<6",  # BERT, T5 and their tokenizers; T5 has fused attention from 5.15 on
    "tokenizers>=0.23.1,<1",  # word pieces of encoders from scratch; 0.23.1 is that of transformers 5.17
    "huggingface_hub>=1.5,<3",  # its messages are held back while a model loads; 1.5 is that of transformers 5.17
    "higher>=0.2.1,<0.3",  # an engine of maml and the peer it is checked against; no release since
    "numpy>=1.26.4,<3",  # episode planning; 1.26 is kept for environments whose other packages need it
    "tensorboard>=2.18,<3",  # event files and the embedding projector; 2.18 is the first for numpy 2.1
    "accelerate>=1.2,<2",  # devices, mixed precision and ranks under one interface
    "safetensors>=0.8,<1",  # checkpoints without pickle; 0.8 is that of transformers 5.17
    "scikit-learn>=1.5.2,<2",  # digits, t-SNE, neighbours, silhouette; 1.5.2: Python 3.13
    "scipy>=1.14.1,<2",  # Student t intervals; 1.14.1 is the first for Python 3.13
    "matplotlib>=3.9.2,<4",  # figures; 3.9.2 is the first for Python 3.13
    "tqdm>=4.66.1,<5",  # progress bars
    "pillow>=10.4",  # image files; a new major number every year, the calls used here are stable
    "pytorch-metric-learning>=2.8,<3",  # NT-Xent, the loss of the SimCLR baseline; 2.8 runs with numpy 2
]

EXTRAS = {
    # What `import learn2learn` needs. learn2learn itself is not named here: its source distribution builds
    # only with a config setting that pip passes to no dependency, and its own requirements would bring numpy
    # below 2. `make` installs it after this extra (.ci/setup-env.sh); by hand, the second line of:
    #   pip install "metapretrain[learn2learn]"
    #   pip install --no-deps --config-settings="--build-option=build_ext" learn2learn==0.2.0
    "learn2learn": ["gym>=0.26,<0.27", "requests>=2.31,<3"],
    "peers": [  # measured beside the toolkit by benchmarks/run_speed.py, as learn2learn and higher are
        "easyfsl>=1.5,<2",  # the prototypical loss
        "kornia>=0.9,<0.10",  # augmentation
        "torchopt>=0.7.3,<0.8",  # MAML; 0.7.3 is the last release
        "jax>=0.4.30,<1",  # meta-steps of MAML
    ],
    "tables": [  # .parquet and .xlsx tables
        "pandas>=2.2,<4",  # reads them
        "pyarrow>=17",  # Parquet, and what `datasets` wrote into it
        "openpyxl>=3.1,<4",  # Excel
    ],
    "gguf": ["gguf>=0.10,<1"],  # language models in GGUF, such as SmolLM2; 0.10 is the first that transformers takes
    "timm": ["timm>=1.0,<2"],  # pretrained image encoders named timm:NAME
    "onnx": [  # metapretrain export RUN --format onnx
        "onnx>=1.17,<2",  # the format
        "onnxscript>=0.5,<1",  # torch writes it with this
        "onnxruntime>=1.20,<2",  # runs the file; the tests compare with it
    ],
    "completion": ["shtab>=1.7,<2"],  # metapretrain completion: scripts for bash and zsh from the parser
    "trackers": ["wandb>=0.19.10,<1", "mlflow>=2.20,<4"],  # services of --log-to; the first that keep runs apart
    "umap": ["umap-learn>=0.5.7,<0.6"],  # UMAP figures beside t-SNE
    "docs": [  # the documentation site, by `make docs`
        "mkdocs>=1.6,<2",  # takes docs/*.md as they are; 2 has other plugins
        "mkdocs-material>=9.5,<10",  # its theme, with search
        "mkdocstrings>=1,<2",  # API pages; reads docstrings without importing anything
        "mkdocstrings-python>=2,<3",  # its half for Python
    ],
    "dev": [
        "build>=1.2",  # the wheel and the source distribution of `make release`
        "hypothesis>=6.100,<7",  # property tests
        "mypy>=1.13",  # strict types; 1.13 is the first for Python 3.13
        "peft>=0.14,<1",  # loads saved prompts in the tests; 0.14 is the first for Python 3.13
        "pytest>=8.3.5",  # tests and doctests
        "pytest-xdist>=3.6",  # tests side by side
        "ruff>=0.8",  # lint
        "sentence-transformers>=5.2,<7",  # saved text encoders are loaded with it; it needs nothing that is not above
        "twine>=6.1",  # checks what `make release` built; 6.1 is the first for metadata 2.4
        "types-tqdm>=4.66",  # stubs for tqdm, which ships no types
    ],
}

setup(
    name="metapretrain",
    version=version(),
    description="A meta-learning toolkit for pretraining: episodes, prototypes, MAML and task scheduling",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="metapretrain contributors",
    license="MIT",
    license_files=["LICENSE"],
    packages=find_packages(include=["metapretrain", "metapretrain.*"]),
    package_data={"metapretrain": ["py.typed", "experiments/model_card.md"]},
    python_requires=">=3.11,<3.14",
    install_requires=CORE,
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["metapretrain = metapretrain.cli:main"]},
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Operating System :: MacOS",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
