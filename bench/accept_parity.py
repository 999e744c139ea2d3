"""Token ids, greedy and in float32: a prefill and a decode process joined by NIXL, against one process of ours, and
against transformers, which reads the same GGUF file by itself.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.utils import logging

from cluster import Cluster
from paceline.checkpoint import Source, read_config, resolve
from paceline.client import Client, Completion, Message, worker_info
from paceline.config import UpConfig, load
from paceline.text import Tokenizer
from paceline.types import FinishReason
from prompts import Case, cases
from report import Report

CASES = 100
CLIENTS = 4
TIMEOUT_S = 300.0
ENDED_BY_MODEL = 10
"""So many answers at least must end by the model's own end-of-sequence token, or its handling was not compared."""
TIED = {"lm_head.weight"}
"""The output head is the embedding: the file has it once."""


@dataclass(frozen=True)
class Answers:
    """What a cluster answered to every case, in order. `eos_token_ids` are its model's."""

    completions: list[Completion]
    eos_token_ids: tuple[int, ...]
    seconds: float

    @property
    def tokens(self) -> list[tuple[int, ...]]:
        """The token ids of each answer."""
        return [completion.token_ids for completion in self.completions]


@dataclass(frozen=True)
class Beams:
    """What a beam search of transformers found, the best first."""

    sequences: list[tuple[int, ...]]
    scores: list[float]  # log-probability over length, by default


def run(report: Report) -> None:
    """Asks all cases of both clusters, then of transformers, and compares."""
    settings = load(UpConfig, file=None, env=os.environ, flags={})
    source = resolve(settings.model, cache_dir=settings.cache_dir, offline=settings.offline)
    asked = cases(Tokenizer.load(source).encode)
    report.equal("prompts", len(asked), CASES)
    report.note("of them", ", ".join(f"{number} {kind}" for kind, number in kinds(asked).items()))

    oracle = Reference(source)
    with ThreadPoolExecutor(1) as beside:
        expecting = beside.submit(oracle.answer_all, asked)
        flags = ("--dtype=float32", "--threads=1", "--no-prefix-cache")
        with Cluster(prefill=1, decode=1, flags=(*flags, "--transport=nixl")) as cluster, cluster.client() as client:
            check_apart(report, client)
            apart = ask_all(client, asked)
        with Cluster(prefill=0, decode=1, flags=flags) as cluster, cluster.client() as client:
            single = ask_all(client, asked)
        prompts, expected, seconds = expecting.result()
    check_where_computed(report, apart, single)

    report.note("prompt tokens, shortest and longest", f"{min(map(len, prompts))} and {max(map(len, prompts)):,}")
    report.note("prompt tokens in all", sum(map(len, prompts)))
    report.note("answer tokens in all", sum(map(len, expected)))
    for name, took in (("apart", apart.seconds), ("one process", single.seconds), ("transformers, beside", seconds)):
        report.note(f"seconds, {name}", took, "s")

    counted = [completion.finish.usage.prompt_tokens for completion in apart.completions]
    report.equal("prompts tokenised as transformers does, by length", differing(counted, [len(p) for p in prompts]), [])
    ended = [completion.finish.reason is FinishReason.STOP for completion in apart.completions]
    report.at_least("answers that an end-of-sequence token ended", sum(ended), ENDED_BY_MODEL)
    expected_ends = [tokens[-1] in apart.eos_token_ids for tokens in expected]
    report.equal("ended as transformers' did", differing(ended, expected_ends), [])
    compare(report, "apart == one process", oracle, prompts, apart.tokens, single.tokens)
    compare(report, "apart == transformers", oracle, prompts, apart.tokens, expected)


def kinds(asked: Sequence[Case]) -> Counter[str]:
    """How many cases there are of each kind; those of a given length count as one kind."""
    return Counter("of given lengths" if case.kind.endswith("tokens") else case.kind for case in asked)


def check_apart(report: Report, client: Client) -> None:
    """Prefill and decode are other processes, and what is between them is NIXL."""
    infos = {worker.role: worker_info(worker.address, worker.role) for worker in client.loads().workers}
    pids = [pid for info in infos.values() for pid in info.process_ids]
    report.equal(
        "processes of prefill and decode",
        (len(set(pids)), sorted(role.value for role in infos)),
        (4, ["decode", "prefill"]),
    )
    report.equal("transport", {info.transport for info in infos.values()}, {"nixl"})


def ask_all(client: Client, asked: Sequence[Case]) -> Answers:
    """Several at once, so that batches are compared too."""
    began = time.monotonic()

    def ask(case: Case) -> Completion:
        return client.complete(case.prompt, max_tokens=case.max_tokens, temperature=0.0, timeout=TIMEOUT_S)

    with ThreadPoolExecutor(CLIENTS) as clients:
        completions = list(clients.map(ask, asked))
    return Answers(completions, client.model_info().eos_token_ids, time.monotonic() - began)


def check_where_computed(report: Report, apart: Answers, single: Answers) -> None:
    """Every prompt on the prefill worker in the one case, and none in the other."""
    elsewhere = [
        index
        for index, completion in enumerate(apart.completions)
        if completion.finish.prefill_worker is None or completion.finish.prompt_tokens_computed_on_decode
    ]
    report.equal("apart: prompts not computed on the prefill worker", elsewhere, [])
    landed = [done.finish.transfer.blocks for done in apart.completions if done.finish.usage.completion_tokens > 1]
    report.at_least("apart: KV blocks handed over, least of a prompt", min(landed), 1)
    report.note("apart: KV blocks handed over", sum(landed))
    local = [
        completion.finish.prompt_tokens_computed_on_decode == completion.finish.usage.prompt_tokens
        for completion in single.completions
    ]
    report.equal("one process: prompts computed on the decode worker", sum(local), CASES)


def differing(left: Sequence[object], right: Sequence[object]) -> list[int]:
    """Indices at which two lists differ; all, where they are not of one length."""
    if len(left) != len(right):
        return list(range(max(len(left), len(right))))
    return [index for index, (one, other) in enumerate(zip(left, right, strict=True)) if one != other]


class Reference:
    """transformers' own reading of the GGUF file, tokenizer and weights, in float32."""

    def __init__(self, source: Source) -> None:
        assert source.path is not None
        # It computes beside the clusters, and threads that wait for one another do badly on cores that are shared.
        torch.set_num_threads(1)
        logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        folder, name = str(source.path.parent), source.path.name
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, gguf_file=name)
        # As `from_pretrained` does it, which asks for one more package to place the weights on devices.
        config = AutoConfig.from_pretrained(folder, gguf_file=name)
        models, read = cast("Any", AutoModelForCausalLM), cast("Any", load_gguf_checkpoint)
        model: Any = models.from_config(config, dtype=torch.float32)
        tensors = read(str(source.path), return_tensors=True, model_to_load=model)["tensors"]
        weights = {weight: torch.as_tensor(values) for weight, values in tensors.items()}
        missing, unexpected = model.load_state_dict(weights, strict=False)
        assert not unexpected and set(missing) <= TIED, f"transformers read {unexpected} too many, {missing} too few"
        model.tie_weights()
        self.model = model.eval()
        self._eos = list(read_config(source).eos_token_ids)

    def answer_all(self, asked: Sequence[Case]) -> tuple[list[list[int]], list[tuple[int, ...]], float]:
        """The token ids of all prompts, those of all answers, and the seconds that it took."""
        began = time.monotonic()
        prompts = [self.encode(case.prompt) for case in asked]
        answers = [self.generate(prompt, case.max_tokens) for prompt, case in zip(prompts, asked, strict=True)]
        return prompts, answers, time.monotonic() - began

    def encode(self, prompt: str | list[Message] | list[int]) -> list[int]:
        """The prompt's token ids."""
        if isinstance(prompt, str):
            ids: list[int] = self._tokenizer.encode(prompt)
            return ids
        turns = [{"role": turn.role, "content": turn.content} for turn in prompt if isinstance(turn, Message)]
        if not turns:
            return [token for token in prompt if isinstance(token, int)]
        rendered: dict[str, list[int]] = self._tokenizer.apply_chat_template(turns, add_generation_prompt=True)
        return rendered["input_ids"]

    @torch.inference_mode()
    def generate(self, prompt: list[int], max_tokens: int) -> tuple[int, ...]:
        """The greedy answer, up to and with an end-of-sequence token."""
        ids = torch.tensor([prompt])
        found = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=self._eos,
            pad_token_id=self._eos[0],
        )
        return tuple(found[0, len(prompt) :].tolist())

    @torch.inference_mode()
    def search(self, prompt: list[int], width: int, max_tokens: int) -> Beams:
        """All beams of a beam search, each up to and with an end-of-sequence token, the best first."""
        ids = torch.tensor([prompt])
        found = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            num_beams=width,
            num_return_sequences=width,
            do_sample=False,
            eos_token_id=self._eos,
            pad_token_id=self._eos[0],
            output_scores=True,
            return_dict_in_generate=True,
        )
        sequences = []
        for answer in found.sequences[:, len(prompt) :].tolist():
            ends = [place for place, token in enumerate(answer) if token in self._eos]
            sequences.append(tuple(answer[: ends[0] + 1] if ends else answer))
        return Beams(sequences, found.sequences_scores.tolist())

    @torch.inference_mode()
    def gap(self, context: list[int]) -> str:
        """How near the two most likely next tokens are, in float64: a difference there may be one of rounding."""
        logits = self.model.double()(torch.tensor([context])).logits[0, -1]
        self.model.float()
        best = logits.topk(2)
        return f"float64 logits {best.values.tolist()} of tokens {best.indices.tolist()}"


def compare(
    report: Report,
    name: str,
    reference: Reference,
    prompts: Sequence[list[int]],
    ours: Sequence[tuple[int, ...]],
    theirs: Sequence[tuple[int, ...]],
) -> None:
    """Every id of every answer; of those that differ, where, and how near a tie it was."""
    wrong = differing(ours, theirs)
    for index in wrong:
        pairs = zip(ours[index], theirs[index], strict=False)  # one may be the other's beginning
        place = next((at for at, pair in enumerate(pairs) if pair[0] != pair[1]), None)
        if place is None:
            report.note(f"case {index}", f"{len(ours[index])} tokens against {len(theirs[index])}")
            continue
        tokens = f"{ours[index][place]} against {theirs[index][place]}"
        report.note(
            f"case {index}, token {place}", f"{tokens}; {reference.gap([*prompts[index], *ours[index][:place]])}"
        )
    report.equal(f"{name}: answers that differ", wrong, [])
    report.equal(f"{name}: answers that are equal", len(ours) - len(wrong), CASES)
