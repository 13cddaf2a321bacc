"""Packaging of tf_adadp."""

import pathlib

from setuptools import find_packages, setup

HERE = pathlib.Path(__file__).parent

setup(
    name="tf_adadp",
    version="0.1.0",
    description="Adaptive differentially private optimizers for Keras on TensorFlow",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11,<3.14",
    packages=find_packages(include=["tf_adadp", "tf_adadp.*"]),
    install_requires=[
        "tensorflow>=2.18",
        "keras>=3.8",
        "dp-accounting>=0.6.0",
        "numpy>=1.26",
        "scipy>=1.11",
    ],
    extras_require={
        "audit": ["matplotlib>=3.9", "scikit-learn>=1.5"],
        "examples": [
            "absl-py>=2.1",
            "matplotlib>=3.9",
            "scikit-learn>=1.5",
            "tensorboard>=2.18",
            "tensorflow-datasets>=4.9.7",
        ],
        "test": [
            "hypothesis>=6.100",
            "mpmath>=1.3",
            "pandas>=2.2.2",
            "pytest>=8",
            "pytest-xdist>=3.6",
            "ruff==0.17.5",
        ],
    },
    classifiers=[
        "License :: OSI Approved :: Apache Software License",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
    ],
)
