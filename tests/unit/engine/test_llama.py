"""The model against transformers: random tiny configurations by their logits, the default model by its greedy ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers import modeling_gguf_pytorch_utils as gguf_reader

from paceline.checkpoint import ModelConfig, Source, read_config
from paceline.engine.batch import build_batch
from paceline.engine.block_pool import BlockPool
from paceline.engine.engine import Engine
from paceline.engine.request import Chunk, EngineRequest
from paceline.engine.runner import Runner
from paceline.engine.weights import LayerWeights, Weights, load
from paceline.text import Tokenizer
from paceline.types import RequestId, SamplingParams, blocks_for


def fused(model: Any) -> Weights:
    """A transformers model's weights as ours."""
    state = {name: value.detach() for name, value in model.state_dict().items()}

    def layer(index: int) -> LayerWeights:
        part = {
            name.removeprefix(f"model.layers.{index}."): value
            for name, value in state.items()
            if name.startswith(f"model.layers.{index}.")
        }
        return LayerWeights(
            input_norm=part["input_layernorm.weight"],
            qkv=torch.cat([part[f"self_attn.{name}_proj.weight"] for name in "qkv"]),
            o=part["self_attn.o_proj.weight"],
            mlp_norm=part["post_attention_layernorm.weight"],
            gate_up=torch.cat([part[f"mlp.{name}_proj.weight"] for name in ("gate", "up")]),
            down=part["mlp.down_proj.weight"],
        )

    return Weights(
        embed=state["model.embed_tokens.weight"],
        layers=tuple(layer(index) for index in range(model.config.num_hidden_layers)),
        final_norm=state["model.norm.weight"],
        lm_head=state["lm_head.weight"],
    )


def tiny_pair(kv_heads: int, group: int, head_dim: int) -> tuple[Any, ModelConfig]:
    heads = kv_heads * group
    config = LlamaConfig(
        vocab_size=331,
        hidden_size=heads * head_dim,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        initializer_range=0.3,
    )
    torch.manual_seed(group)
    model: Any = LlamaForCausalLM(config)
    model.eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:  # all ones otherwise, which would hide a norm that is left out
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    ours = ModelConfig(
        architecture="llama",
        name="tiny",
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        context_tokens=256,
        norm_eps=1e-5,
        rope_theta=10_000.0,
        tied_embeddings=False,
        eos_token_ids=(),
    )
    return model, ours


def prompts(lengths: Sequence[int], vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, vocab_size, (length,), generator=generator).tolist() for length in lengths]


def stored_requests(token_lists: Sequence[list[int]], num_blocks: int) -> list[EngineRequest]:
    pool = BlockPool(num_blocks)
    leases = [pool.lease(blocks_for(len(tokens))) for tokens in token_lists]
    return [
        EngineRequest(
            RequestId(str(index)), list(tokens), len(tokens), SamplingParams(), pool.lease(blocks_for(len(tokens)))
        )
        for index, (tokens, lease) in enumerate(zip(token_lists, leases, strict=True))
    ]


@pytest.mark.parametrize("group", [1, 2, 3, 4])
@pytest.mark.parametrize("chunk", [1, 7, 64])
@torch.inference_mode()
def test_logits_of_a_mixed_batch_equal_transformers(group: int, chunk: int) -> None:
    """All requests advance by `chunk` tokens a step, so that fresh prompts, later chunks and single tokens meet."""
    model, config = tiny_pair(kv_heads=2, group=group, head_dim=16)
    runner = Runner(config, fused(model), num_blocks=40)
    token_lists = prompts((1, 2, 7, 8, 16, 17, 40, 93), config.vocab_size)
    requests = stored_requests(token_lists, 40)
    found: dict[RequestId, torch.Tensor] = {}
    while len(found) < len(requests):
        batch = [
            Chunk(each, each.computed, min(chunk, each.remaining)) for each in requests if each.request_id not in found
        ]
        logits = runner.model.forward(build_batch(batch, runner.pool), runner.pool, lambda: None)
        sampled = [part.request.request_id for part in batch if part.samples]
        found.update(zip(sampled, logits, strict=True))
        for part in batch:
            part.request.computed = part.end
    for each, tokens in zip(requests, token_lists, strict=True):
        expected = model(torch.tensor([tokens])).logits[0, -1]
        assert expected.std() > 0.1  # logits that hardly differ would compare equal by accident
        torch.testing.assert_close(found[each.request_id], expected, atol=1e-4, rtol=1e-4)


def test_a_bfloat16_model_stays_close_to_its_float32_self() -> None:
    model, config = tiny_pair(kv_heads=2, group=2, head_dim=16)
    token_lists = prompts((5, 40), config.vocab_size)
    logits = []
    for dtype in (torch.float32, torch.bfloat16):
        runner = Runner(config, fused(model.to(dtype)), num_blocks=8)
        assert runner.pool.dtype == dtype
        chunks = [Chunk(each, 0, each.remaining) for each in stored_requests(token_lists, 8)]
        with torch.inference_mode():
            logits.append(runner.model.forward(build_batch(chunks, runner.pool), runner.pool, lambda: None))
    wide, narrow = logits
    assert torch.nn.functional.cosine_similarity(wide, narrow).min() > 0.99


TEXTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village by the sea,",
    "1, 1, 2, 3, 5, 8, 13,",
    "Q: What is the boiling point of water in Celsius?\nA:",
    "こんにちは、世界。",
    "🚴 🚴 🚴",
    "a",
    "SELECT name, age FROM users WHERE",
    "The quick brown fox jumps over the lazy dog. " * 12,
    "import numpy as np\n\nx = np." * 9,
    "Water, wind and time shape the coast. " * 25,
)
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def oracle(default_model: Source) -> Any:
    """transformers' own reading of the same file, dequantised to float32."""
    path = str(default_model.path)
    read: Any = gguf_reader.load_gguf_checkpoint
    fields = dict(read(path)["config"])
    fields.pop("model_type")
    model: Any = LlamaForCausalLM(LlamaConfig(**fields))
    model.float().eval()
    tensors = read(path, return_tensors=True, model_to_load=model)["tensors"]
    left = model.load_state_dict(tensors, strict=False)
    assert (left.missing_keys, left.unexpected_keys) == (["lm_head.weight"], [])
    model.tie_weights()
    return model


@pytest.fixture(scope="module")
def model_prompts(default_model: Source) -> list[list[int]]:
    tokenizer = Tokenizer.load(default_model)
    return [list(tokenizer.encode(text)) for text in TEXTS]


@pytest.fixture(scope="module")
def expected_ids(oracle: Any, model_prompts: list[list[int]]) -> list[list[int]]:
    found = []
    for tokens in model_prompts:
        ids = torch.tensor([tokens])
        made = oracle.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
        )
        found.append(made[0, len(tokens) :].tolist())
    return found


@pytest.mark.model
@pytest.mark.parametrize("token_budget", [7, 64, 512])
def test_greedy_ids_equal_transformers_whatever_the_chunking(
    default_model: Source, model_prompts: list[list[int]], expected_ids: list[list[int]], token_budget: int
) -> None:
    config = read_config(default_model)
    weights = load(default_model, config, dtype=torch.float32, device="cpu")
    engine = Engine(config, weights, num_blocks=160, token_budget=token_budget)
    sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0)
    found: dict[RequestId, list[int]] = {}
    for index, tokens in enumerate(model_prompts):
        lease = engine.try_reserve(len(tokens) + NEW_TOKENS - 1, upfront_tokens=len(tokens))
        assert lease is not None
        name = RequestId(str(index))
        found[name] = []
        engine.add(name, tokens, sampling, lease=lease)
    while engine.has_work:
        for done in engine.step().progress:
            found[done.request_id] += done.token_ids
    assert list(found.values()) == expected_ids
    assert engine.pool.free == engine.pool.total
