"""The outputs' derived figures, and the errors as callers catch them."""

from __future__ import annotations

import dataclasses
import pickle

import pytest

from pagedllm import errors
from pagedllm.outputs import CompletionOutput, RequestMetrics, RequestOutput


def test_times_follow_from_the_clock_readings() -> None:
    metrics = RequestMetrics(arrival_time=10.0)
    assert (metrics.queue_time, metrics.ttft, metrics.e2e_time) == (None, None, None)
    metrics = RequestMetrics(
        arrival_time=10.0, first_scheduled_time=10.5, first_token_time=11.0, finished_time=14.0
    )
    assert (metrics.queue_time, metrics.ttft, metrics.e2e_time) == (0.5, 1.0, 4.0)


def test_outputs_are_frozen_snapshots() -> None:
    answer = CompletionOutput(index=0, text="x", finish_reason="stop")
    output = RequestOutput(request_id="1", outputs=[answer], finished=True)
    assert answer.finished
    assert not CompletionOutput(index=1).finished
    for each, name in ((answer, "text"), (output, "finished")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(each, name, None)
    assert pickle.loads(pickle.dumps(output)) == output


def test_one_base_catches_all_and_wrong_values_are_value_errors() -> None:
    kinds = [each for each in vars(errors).values() if isinstance(each, type)]
    assert all(issubclass(kind, errors.PagedLLMError) for kind in kinds)
    for kind in (errors.ConfigError, errors.ValidationError, errors.RequestTooLongError):
        assert issubclass(kind, ValueError)
    error = pickle.loads(pickle.dumps(errors.RequestTooLongError("too long", "prompt")))
    assert str(error) == "too long"
    assert error.parameter == "prompt"
