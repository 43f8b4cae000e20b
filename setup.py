"""Packaging of mindformers_core: `pip install .`, `pip install ".[plot]"`."""

from pathlib import Path

from setuptools import find_packages, setup

EXTRAS = {
    "test": ["pytest>=7", "pytest-xdist>=3.5"],
    "plot": ["matplotlib>=3.7"],
    "dev": ["ruff>=0.5"],
    "tensorboard": ["tensorboard>=2.12"],
    "tokenizer": ["tokenizers>=0.15", "jinja2>=3.1"],
    "parquet": ["pyarrow>=14"],
}

setup(
    name="mindformers_core",
    version="0.1.0",
    description="Parallel training for MindSpore: single-card code on a mesh of devices",
    long_description=(Path(__file__).parent / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["mindformers_core", "mindformers_core.*"]),
    python_requires=">=3.10,<3.13",
    # We import scipy (initial values) and psutil (scripts/launch.py, tests), too: MindSpore 2.10 itself requires both.
    install_requires=["mindspore==2.10.*", "numpy>=1.26,<2", "pyyaml"],
    extras_require=EXTRAS,
)
