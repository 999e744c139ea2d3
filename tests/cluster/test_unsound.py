"""Engines whose every prompt is spoilt, through real processes: they end, come back, and serve what is sound."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from paceline.errors import NumericalError, PacelineError
from paceline.services.worker.loop import MOST_SPOILT
from paceline.testing.checkpoints import random_tensors, write_folder
from paceline.testing.cluster import Cluster
from paceline.testing.scrape import wait_for
from paceline.types import Role

pytestmark = pytest.mark.cluster

SPOILT, SOUND = [7] * 20, [8] * 20


@pytest.fixture
def model(tmp_path: Path) -> str:
    """Gives NaN for every prompt with token 7 in it, as a damaged engine does for all."""
    tensors = random_tensors()
    tensors["model.embed_tokens.weight"][SPOILT[0]] = np.nan
    write_folder(tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    return str(tmp_path)


def test_workers_that_spoil_prompt_after_prompt_are_started_anew(model: str) -> None:
    with Cluster.start(1, 1, model=model) as cluster, cluster.client() as client:
        expected = client.complete(SOUND, max_tokens=8, temperature=0.0, ignore_eos=True).token_ids
        before = {worker.key for worker in client.loads().workers}
        for number in range(2 * MOST_SPOILT):
            with pytest.raises(PacelineError) as failed:
                client.complete([*SPOILT, number + 10], max_tokens=8)
            if not isinstance(failed.value, NumericalError):
                break  # who is in hand when an engine ends hears of its end, or waits for the next life

        def anew() -> bool:
            workers = {worker.key for worker in client.loads().workers}
            return {key.worker_id for key in workers} == {key.worker_id for key in before} and not workers & before

        wait_for(anew, "both workers, started anew")
        cluster.wait_ready()
        answer = client.complete(SOUND, max_tokens=8, temperature=0.0, ignore_eos=True)
        assert answer.token_ids == expected
        assert {worker.role for worker in client.loads().workers} == {Role.PREFILL, Role.DECODE}
        cluster.wait_idle()


def test_one_spoilt_prompt_among_sound_ones_ends_nothing(model: str) -> None:
    with Cluster.start(1, 1, model=model) as cluster, cluster.client() as client:
        before = {worker.key for worker in client.loads().workers}
        for number in range(MOST_SPOILT + 2):
            with pytest.raises(NumericalError):
                client.complete([*SPOILT, number + 10], max_tokens=8)
            # The likeliest tokens, of which none is the damaged one: a drawn one might be.
            answer = client.complete([*SOUND, number + 10], max_tokens=2, temperature=0.0, ignore_eos=True)
            assert SPOILT[0] not in answer.token_ids
        assert {worker.key for worker in client.loads().workers} == before
        cluster.wait_idle()
