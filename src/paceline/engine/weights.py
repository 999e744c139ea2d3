"""A model's weights on a device, fused the way the forward pass multiplies by them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Final

import numpy as np
import torch

from paceline import kernels
from paceline.checkpoint import HostTensor, ModelConfig, QuantisedRows, Source, SourceKind, Tensors, open_tensors
from paceline.errors import CheckpointError, quote

DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)

Progress = Callable[[int, int], None]
"""Called with (tensors loaded, tensors in all) after each."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. Matrices are [out, in], as `torch.nn.functional.linear` takes them; None: the model has no such thing.

    Gemma's norms are stored as Gemma multiplies by them, 1 + w.
    """

    input_norm: torch.Tensor  # [hidden]
    qkv: torch.Tensor  # [(heads + 2 * kv_heads) * head_dim, hidden]: all of q, then k, then v
    o: torch.Tensor  # [hidden, heads * head_dim]
    mlp_norm: torch.Tensor  # [hidden], before the MLP
    gate_up: torch.Tensor  # [2 * intermediate, hidden]: all of gate, then up
    down: torch.Tensor  # [hidden, intermediate]
    qkv_bias: torch.Tensor | None = None  # [(heads + 2 * kv_heads) * head_dim]
    q_norm: torch.Tensor | None = None  # [head_dim]
    k_norm: torch.Tensor | None = None  # [head_dim]
    attention_out_norm: torch.Tensor | None = None  # [hidden], of what attention adds to the residual
    mlp_out_norm: torch.Tensor | None = None  # [hidden], of what the MLP adds

    def tensors(self) -> Iterator[torch.Tensor]:
        """Those there are."""
        yield from (value for field in fields(self) if (value := getattr(self, field.name)) is not None)


@dataclass(frozen=True, slots=True)
class Weights:
    """The whole model, in one dtype on one device."""

    embed: torch.Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor  # [hidden]
    lm_head: torch.Tensor  # [vocab, hidden]; the same tensor as `embed` where the two are tied

    @property
    def nbytes(self) -> int:
        """Bytes in device memory."""
        return sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in self._tensors()}.values())

    @property
    def step_nbytes(self) -> int:
        """Bytes that a decode step reads, however many requests share it.

        Of the embedding that is a row a request, which is nothing, unless it is the head too.
        """
        return sum(kernels.nbytes_read(tensor) for tensor in self._multiplied())

    def _tensors(self) -> Iterator[torch.Tensor]:
        yield self.embed
        yield from self._multiplied()

    def _multiplied(self) -> Iterator[torch.Tensor]:
        yield from (self.final_norm, self.lm_head)
        for layer in self.layers:
            yield from layer.tensors()


def load(
    source: Source,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    seed: int = 0,
    progress: Progress | None = None,
) -> Weights:
    """Loads `source`, whose shape is `config`; a dummy gets values that depend on `seed`, dtype and device kind alone.

    One tensor at a time passes through host memory. Raises `CheckpointError` for a tensor that is missing, of another
    shape, or unknown to the model: one that went unused would make wrong answers.
    """
    assert dtype in DTYPES, f"{dtype} is none of {DTYPES}"
    weights = _allocate(config, dtype, torch.device(device))
    slots = list(_slots(config, weights))
    if source.kind is SourceKind.DUMMY:
        _fill_randomly(slots, torch.Generator(device).manual_seed(seed), progress)
        return weights
    with open_tensors(source) as tensors:
        _check_names(source, config, tensors, slots)
        for index, slot in enumerate(slots):
            values = _as_torch(tensors.read(slot.name))
            slot.target.copy_(values.float() + 1.0 if slot.plus_one else values)
            if progress is not None:
                progress(index + 1, len(slots))
        if kernels.reads_quantised(weights.embed):
            _attach_quantised(weights, tensors, slots)
    return weights


def _attach_quantised(weights: Weights, tensors: Tensors, slots: list[_Slot]) -> None:
    """Gives each matrix the rows that its file has, where all its parts are quantised alike: a sixth of the bytes."""
    parts: dict[int, list[QuantisedRows | None]] = {}  # of each matrix, in the order of its rows
    for slot in slots:
        if slot.target.dim() == 2:
            parts.setdefault(slot.target.untyped_storage().data_ptr(), []).append(tensors.quantised(slot.name))
    layers = ((layer.qkv, layer.o, layer.gate_up, layer.down) for layer in weights.layers)
    for matrix in {id(each): each for each in (weights.lm_head, *itertools.chain(*layers))}.values():
        stored = [part for part in parts[matrix.untyped_storage().data_ptr()] if part is not None]
        if sum(len(part.rows) for part in stored) == len(matrix) and len({part.encoding for part in stored}) == 1:
            rows = torch.from_numpy(np.concatenate([part.rows for part in stored]))
            kernels.attach_quantised(matrix, stored[0].encoding, rows)


def nbytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes that the weights of a model of this shape take."""
    return _allocate(config, dtype, torch.device("meta")).nbytes


@dataclass(frozen=True, slots=True)
class _Slot:
    """Where a checkpoint's tensor goes: a view of a weight, contiguous."""

    name: str
    target: torch.Tensor
    plus_one: bool = False  # the checkpoint holds 1 less


def _allocate(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Weights:
    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    hidden, intermediate = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    is_gemma = config.architecture == "gemma3"
    embed = empty(config.vocab_size, hidden)
    return Weights(
        embed=embed,
        layers=tuple(
            LayerWeights(
                input_norm=empty(hidden),
                qkv=empty(q_size + 2 * kv_size, hidden),
                o=empty(hidden, q_size),
                mlp_norm=empty(hidden),
                gate_up=empty(2 * intermediate, hidden),
                down=empty(hidden, intermediate),
                qkv_bias=empty(q_size + 2 * kv_size) if config.qkv_bias else None,
                q_norm=empty(config.head_dim) if config.qk_norm else None,
                k_norm=empty(config.head_dim) if config.qk_norm else None,
                attention_out_norm=empty(hidden) if is_gemma else None,
                mlp_out_norm=empty(hidden) if is_gemma else None,
            )
            for _ in range(config.num_layers)
        ),
        final_norm=empty(hidden),
        lm_head=embed if config.tied_embeddings else empty(config.vocab_size, hidden),
    )


def _slots(config: ModelConfig, weights: Weights) -> Iterator[_Slot]:
    """Every tensor of a checkpoint, by its Hugging Face name, with its place."""
    is_gemma = config.architecture == "gemma3"
    yield _Slot("model.embed_tokens.weight", weights.embed)
    for index, layer in enumerate(weights.layers):
        for name, target in _layer_slots(config, layer).items():
            yield _Slot(f"model.layers.{index}.{name}", target, plus_one=is_gemma and name.endswith("norm.weight"))
    yield _Slot("model.norm.weight", weights.final_norm, plus_one=is_gemma)
    if not config.tied_embeddings:
        yield _Slot("lm_head.weight", weights.lm_head)


def _layer_slots(config: ModelConfig, layer: LayerWeights) -> dict[str, torch.Tensor]:
    """The places of one layer's tensors, by their names behind the layer's."""
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    found = {
        "input_layernorm.weight": layer.input_norm,
        **_thirds("weight", layer.qkv, q_size, kv_size),
        "self_attn.o_proj.weight": layer.o,
        "mlp.gate_proj.weight": layer.gate_up[: config.intermediate_size],
        "mlp.up_proj.weight": layer.gate_up[config.intermediate_size :],
        "mlp.down_proj.weight": layer.down,
    }
    if layer.qkv_bias is not None:
        found |= _thirds("bias", layer.qkv_bias, q_size, kv_size)
    if layer.q_norm is not None and layer.k_norm is not None:
        found |= {"self_attn.q_norm.weight": layer.q_norm, "self_attn.k_norm.weight": layer.k_norm}
    if layer.attention_out_norm is None or layer.mlp_out_norm is None:
        return found | {"post_attention_layernorm.weight": layer.mlp_norm}
    return found | {
        "post_attention_layernorm.weight": layer.attention_out_norm,
        "pre_feedforward_layernorm.weight": layer.mlp_norm,
        "post_feedforward_layernorm.weight": layer.mlp_out_norm,
    }


def _thirds(kind: str, fused: torch.Tensor, q_size: int, kv_size: int) -> dict[str, torch.Tensor]:
    """The places of queries', keys' and values' parts in a fused tensor."""
    return {
        f"self_attn.q_proj.{kind}": fused[:q_size],
        f"self_attn.k_proj.{kind}": fused[q_size : q_size + kv_size],
        f"self_attn.v_proj.{kind}": fused[q_size + kv_size :],
    }


def _fill_randomly(slots: list[_Slot], generator: torch.Generator, progress: Progress | None) -> None:
    """Norms of 1, no bias, and matrices of variance 1 / fan-in: activations and logits stay of the order of 1."""
    for index, slot in enumerate(slots):
        if slot.target.dim() == 1:
            slot.target.fill_(0.0 if slot.name.endswith("bias") else 1.0)
        else:
            slot.target.normal_(0.0, slot.target.shape[-1] ** -0.5, generator=generator)
        if progress is not None:
            progress(index + 1, len(slots))


def _check_names(source: Source, config: ModelConfig, tensors: Tensors, slots: list[_Slot]) -> None:
    infos = tensors.infos
    for slot in slots:
        info, expected = infos.get(slot.name), tuple(slot.target.shape)
        if info is None:
            raise CheckpointError(f"{source.path}: tensor {slot.name} of shape {expected} is missing")
        if info.shape != expected:
            raise CheckpointError(
                f"{source.path}: tensor {slot.name} has the shape {info.shape}, expected {expected} by its config"
            )
    # Some folders store the head although it is tied, and some the rotary frequencies, which follow from the config.
    unused = infos.keys() - {slot.name for slot in slots} - ({"lm_head.weight"} if config.tied_embeddings else set())
    unknown = sorted(name for name in unused if not name.endswith(".rotary_emb.inv_freq"))
    if unknown:
        raise CheckpointError(
            f"{source.path}: {len(unknown)} tensors have no place in the model, the first is {quote(unknown[0])}: "
            "this is a variant of the architecture that is not supported"
        )


def _as_torch(tensor: HostTensor) -> torch.Tensor:
    if tensor.is_bfloat16:
        return torch.from_numpy(tensor.array.view("int16")).view(torch.bfloat16)
    return torch.from_numpy(tensor.array)
