"""The hand-off of a long prompt hides behind its computation: parts land while later chunks are being computed."""

from __future__ import annotations

import os

from cluster import Cluster
from paceline.checkpoint import read_config, resolve
from paceline.config import UpConfig, load
from paceline.kvtransfer.layout import KvLayout
from paceline.types import blocks_for
from report import Report

PROMPT_TOKENS = 2000
CHUNK_TOKENS = 512
CHUNKS = -(-PROMPT_TOKENS // CHUNK_TOKENS)
ANSWER_TOKENS = 8
DTYPE = "float32"
WORKERS = ("prefill-0", "decode-0")


def run(report: Report) -> None:
    """Serves one long prompt, after a short one that pays for what is lazy, and reads what each side says of it."""
    settings = load(UpConfig, file=None, env=os.environ, flags={})
    shape = read_config(resolve(settings.model, cache_dir=settings.cache_dir, offline=settings.offline))
    block_bytes = KvLayout.of(shape, dtype=DTYPE).block_bytes
    prompt = [(7 * index) % 40_000 + 100 for index in range(PROMPT_TOKENS)]
    flags = (f"--max-batch-tokens={CHUNK_TOKENS}", "--no-prefix-cache", f"--dtype={DTYPE}")
    with Cluster(prefill=1, decode=1, flags=flags) as cluster, cluster.client() as client:
        client.complete([1, 2, 3], max_tokens=2, ignore_eos=True)
        before = [cluster.metrics(worker) for worker in WORKERS]
        done = client.complete(prompt, max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True)
        after = [cluster.metrics(worker) for worker in WORKERS]
    finish, transfer = done.finish, done.finish.transfer
    prefilled, decoded = map(growth, before, after)
    computed = "paceline_engine_prompt_tokens_computed_total"

    report.equal("answer tokens", len(done.token_ids), ANSWER_TOKENS)
    report.note("prompt", f"{PROMPT_TOKENS} tokens in {CHUNKS} chunks of at most {CHUNK_TOKENS}")
    report.equal("computed on a prefill worker", finish.prefill_worker is not None, True)
    report.equal("prompt tokens that P computed, by its metrics", prefilled[computed], PROMPT_TOKENS)
    report.equal("prompt tokens that D computed, by its metrics", decoded[computed], 0)
    report.equal("prompt tokens that D computed, by the answer", finish.prompt_tokens_computed_on_decode, 0)
    report.equal("attempts", finish.attempts, 1)
    report.equal("blocks moved", transfer.blocks, blocks_for(PROMPT_TOKENS))
    report.equal("bytes moved", transfer.bytes, blocks_for(PROMPT_TOKENS) * block_bytes)
    report.equal("bytes written, by P's metrics", prefilled["paceline_transfer_bytes_total"], float(transfer.bytes))
    report.equal("parts", transfer.parts, CHUNKS)
    report.equal("parts on D before the last chunk began", transfer.parts_before_last_chunk, CHUNKS - 1)
    report.note("prefill took", finish.timings.prefill_s * 1000, "ms")
    report.note("from the first part's landing to the last's", transfer.duration_s * 1000, "ms")
    writing_s = prefilled["paceline_transfer_seconds_sum"]
    report.at_most("writes under way, by P's metrics", writing_s * 1000, finish.timings.prefill_s * 1000, "ms")
    report.note("that is", transfer.bytes / writing_s / 1e9, "GB/s")
    report.note("first token to the client after", finish.timings.first_token_s * 1000, "ms")


def growth(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """By how much each sample grew."""
    return {name: value - before.get(name, 0.0) for name, value in after.items()}
