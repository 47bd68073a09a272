"""GET /metrics: llama-server's names and values, and what lfmfast knows besides."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lfmfast.types import Timings

if TYPE_CHECKING:
    from lfmfast.server.state import ServerState

__all__ = ["CONTENT_TYPE", "Times", "render"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1)


class Times:
    """How long generations took, as histograms."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._first = self._histogram("time_to_first_token_seconds", "From the request to its first token", SECONDS)
        self._queue = self._histogram("queue_seconds", "Waiting before the work began", SECONDS)
        self._token = self._histogram("time_per_output_token_seconds", "Of each token after the first", TOKEN_SECONDS)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"lfmfast:{name}", help, buckets=buckets, registry=self.registry)

    def add(self, times: Timings) -> None:
        """Count a generation that has ended."""
        self._queue.observe(times.queue_ms / 1e3)
        if times.predicted_tokens:
            self._first.observe(times.time_to_first_token_ms / 1e3)
        if times.predicted_tokens > 1:
            self._token.observe(times.predicted_ms / 1e3 / (times.predicted_tokens - 1))


class _Own(Collector):
    def __init__(self, state: ServerState, stats: Mapping[str, int]) -> None:
        self._state = state
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        requests = CounterMetricFamily("lfmfast:http_requests", "Requests that have ended", labels=["status"])
        for status, n in sorted(self._state.n_by_status.items()):
            requests.add_metric([str(status)], n)
        yield requests
        for name, help in (("cache_bytes", "Host memory that past prompts and answers take"),
                           ("cache_nodes", "Prompts and answers, or shared parts of them, that are kept there"),
                           ("n_evicted", "Of these, those that were dropped for want of room")):  # fmt: skip
            yield GaugeMetricFamily(f"lfmfast:{name}", help, self._stats[name])


def render(state: ServerState, stats: Mapping[str, int]) -> bytes:
    """The text for a scraper.

    Parameters
    ----------
    stats : mapping
        The engine's counters.
    """
    registry = CollectorRegistry()
    registry.register(_Own(state, stats))
    return _llama_names(state, stats).encode() + generate_latest(registry) + generate_latest(state.times.registry)


def _llama_names(state: ServerState, stats: Mapping[str, int]) -> str:
    # Written by hand: one of llama-server's counters does not end in _total, which prometheus_client can't write.
    n_prompt = stats["n_prompt"] - stats["n_cached"]
    prompt_s, step_s = stats["prompt_us"] / 1e6, stats["step_us"] / 1e6
    n_in_slots = sum(slot.task is not None for slot in state.slots)
    n_in_steps = max(stats["n_predicted"] - stats["n_requests"], 0)  # the first token of each comes from its prompt
    rows = [
        ("counter", "prompt_tokens_total", "Prompt tokens that were read, without those that were cached", n_prompt),
        ("counter", "prompt_tokens_cached_total", "Prompt tokens that were cached", stats["n_cached"]),
        ("counter", "prompt_seconds_total", "Time spent on passes that read prompts", prompt_s),
        ("counter", "tokens_predicted_total", "Tokens that were generated", stats["n_predicted"]),
        ("counter", "tokens_predicted_seconds_total", "Time spent on passes that generate", step_s),
        ("counter", "n_decode_total", "Passes of the model", stats["n_steps"] + stats["n_prompt_passes"]),
        ("counter", "n_tokens_max", "Most tokens that a prompt and its answer had", state.n_tokens_max),
        ("counter", "spec_decode_num_draft_tokens_total", "Always 0: there are no drafts", 0),
        ("counter", "spec_decode_num_accepted_tokens_total", "Always 0: there are no drafts", 0),
        ("counter", "spec_decode_num_drafts_total", "Always 0: there are no drafts", 0),
        ("gauge", "prompt_tokens_seconds", "Prompt tokens per second, over all passes so far", _rate(n_prompt, prompt_s)),
        ("gauge", "predicted_tokens_seconds", "Generated tokens per second, likewise", _rate(n_in_steps, step_s)),
        ("gauge", "requests_processing", "Generations that have a slot", n_in_slots),
        ("gauge", "requests_deferred", "Generations that wait for one", len(state.running) - n_in_slots),
        ("gauge", "n_busy_slots_per_decode", "Tokens per generating pass", _rate(n_in_steps, stats["n_steps"])),
    ]
    return "".join(
        f"# HELP llamacpp:{name} {help}\n# TYPE llamacpp:{name} {kind}\nllamacpp:{name} {value:.10g}\n"
        for kind, name, help, value in rows
    )


def _rate(n: float, seconds: float) -> float:
    return n / seconds if seconds else 0.0
