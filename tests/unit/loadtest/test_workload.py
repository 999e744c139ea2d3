from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ConfigError
from paceline.loadtest.config import BenchConfig
from paceline.loadtest.workload import Workload


def workload(context_tokens: int | None = None, vocab_size: int = 500, **settings: Any) -> Workload:
    return Workload(BenchConfig(**settings), vocab_size=vocab_size, context_tokens=context_tokens)


def test_prompts_are_ids_below_the_vocabulary_and_equal_for_equal_seeds() -> None:
    one, same, other = (workload(rate=1, seed=seed, input_len=300) for seed in (4, 4, 5))
    jobs = list(islice(one.jobs(), 20))
    prompts = [one.prompt(job) for job in jobs]
    assert all(len(prompt) == 300 and min(prompt) >= 0 and max(prompt) < 500 for prompt in prompts)
    assert len(set(map(tuple, prompts))) == 20, "all differ"
    assert prompts == [same.prompt(job) for job in same.jobs()][:20]
    assert prompts[0] != other.prompt(jobs[0])


def test_a_prefix_is_shared_by_all_prompts_whatever_their_length() -> None:
    load = workload(rate=1, input_len=100, input_spread=0.5, shared_prefix=0.5, requests=50)
    prompts = [load.prompt(job) for job in load.jobs()]
    longest = max(prompts, key=len)
    assert all(prompt[: len(prompt) // 2 - 1] == longest[: len(prompt) // 2 - 1] for prompt in prompts)
    assert len({tuple(prompt[-20:]) for prompt in prompts}) == 50


def test_lengths_spread_evenly_about_their_mean() -> None:
    load = workload(rate=1, input_len=100, input_spread=0.2, output_len=10, output_spread=0.5, requests=2000)
    inputs = [job.input_tokens for job in load.jobs()]
    assert set(inputs) == set(range(80, 121))
    assert {job.output_tokens for job in load.jobs()} == set(range(5, 16))
    assert sum(inputs) / len(inputs) == pytest.approx(100, abs=1.5)


@pytest.mark.parametrize("settings", [{"rate": 5.0}, {"concurrency": 7}, {"concurrency": 3}])
def test_the_shares_of_all_processes_are_the_whole(settings: dict[str, Any]) -> None:
    load = workload(requests=70, **settings)
    shares = [list(load.jobs(share, 3)) for share in range(3)]
    assert sorted((job for share in shares for job in share), key=lambda job: job.index) == list(load.jobs())
    assert all(shares)


def test_a_place_of_a_closed_loop_has_as_many_requests_in_every_process() -> None:
    load = workload(concurrency=5, requests=100)
    assert [len(list(load.jobs(share, 2))) for share in range(2)] == [60, 40], "3 and 2 places, of 20 each"


def test_warm_up_has_prompts_that_the_run_does_not_have() -> None:
    load = workload(rate=1, warmup=5, requests=10)
    warm = [load.prompt(job) for share in range(2) for job in load.warmups(share, 2)]
    assert len(warm) == 5
    assert not {tuple(prompt) for prompt in warm} & {tuple(load.prompt(job)) for job in load.jobs()}


def test_how_many_requests_there_are_is_known_where_it_can_be(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text('{"time": 0, "input_tokens": 5, "output_tokens": 2}\n' * 3)
    assert workload(rate=1).expected == 100
    assert workload(rate=10, duration_s=5).expected == len(list(workload(rate=10, duration_s=5).jobs()))
    assert workload(concurrency=4, requests=9).expected == 9
    assert workload(concurrency=4, duration_s=5).expected is None
    assert workload(trace=trace).expected == 3
    assert [(job.input_tokens, job.output_tokens) for job in workload(trace=trace).jobs()] == [(5, 2)] * 3


def test_a_request_that_exceeds_the_context_is_refused_before_any_is_sent() -> None:
    workload(context_tokens=640, concurrency=1, input_len=512, output_len=128).check()
    with pytest.raises(ConfigError, match="600 prompt and 41 answer tokens exceed the model's context of 640"):
        workload(context_tokens=640, concurrency=1, input_len=500, input_spread=0.2, output_len=41).check()


def test_a_time_without_any_request_is_refused() -> None:
    with pytest.raises(ConfigError, match="no request falls into"):
        workload(rate=0.001, duration_s=0.001).check()
