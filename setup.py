"""Installs gllm (the engine) and rserve (the paper on top of it)."""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
REQUIREMENTS = HERE.joinpath("requirements.txt").read_text().split()

setup(
    name="rserve",
    version="0.1.0",
    description="Serving of large multimodal models with overlapped encoding and prefill (RServe, arXiv 2509.24381)",
    long_description=HERE.joinpath("README.md").read_text() if HERE.joinpath("README.md").exists() else "",
    long_description_content_type="text/markdown",
    python_requires=">=3.11",
    packages=find_packages(include=["gllm*", "rserve*"]),
    package_data={"gllm": ["assets/demo/*"]},
    install_requires=REQUIREMENTS,
    extras_require={
        "test": ["pytest>=8", "pytest-xdist>=3.5", "hypothesis>=6.100", "psutil>=5.9", "matplotlib>=3.8", "triton"],
        "bench": ["matplotlib>=3.8"],
        "cuda": ["triton", "flash-attn"],
        "ray": ["ray>=2.40"],
    },
)
