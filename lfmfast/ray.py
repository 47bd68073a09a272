"""Many machines: LFM2 models in the batch pipelines of Ray Data (``pip install 'lfmfast[ray]'``).

    import ray
    from lfmfast.ray import LFM2Predictor, resources

    reviews = ray.data.read_parquet("reviews/")
    answers = reviews.map_batches(
        LFM2Predictor,
        fn_constructor_kwargs={"model": "LiquidAI/LFM2.5-1.2B-Instruct-GGUF:Q4_K_M", "template": "Summarize: {review}"},
        batch_size=256,
        **resources(concurrency=8),
    )
    answers.write_parquet("answers/")
"""

from __future__ import annotations

import importlib
import math
import secrets
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lfmfast._cpu import cpu_count, default_cache_bytes, threads_of
from lfmfast._many import OF_PROMPT
from lfmfast.batch.reader import Record
from lfmfast.batch.request import N_MAX, OPTIONS, Form, Request, template_columns
from lfmfast.batch.result import columns_of
from lfmfast.batch.run import MAX_STALL_MS, Answering
from lfmfast.batch.table import answer_columns, as_row
from lfmfast.errors import ParameterError
from lfmfast.model import Model
from lfmfast.model_file import check_int
from lfmfast.types import Completion

__all__ = ["LFM2Predictor", "resources"]

_BODY = ("url", "body")


class LFM2Predictor:
    """Answers the rows of a dataset; for :meth:`ray.data.Dataset.map_batches`, where each actor loads the model once.

    A row has what :command:`lfmfast batch` takes: a column `messages` or `prompt`, columns that `prompt_column` or `template`
    name, or `body` and `url` of OpenAI's batch lines. The columns of the dataset are kept. There come to them `text`,
    `reasoning`, `tool_calls` and `logprobs` (JSON), `finish_reason`, `seed`, `prompt_tokens`, `completion_tokens`,
    `cached_tokens`, and `error`: why a row has no answer, else null. A bad row spoils no other.

    Parameters
    ----------
    model : str
        A GGUF file, the same path on all machines, or a name on the Hugging Face Hub ("owner/repo:QUANT").
    prompt_column : str, optional
        The column that is the prompt: a text, or messages.
    template : str, optional
        The prompt, with names of columns in braces.
    system_prompt : str, optional
        For conversations that have none.
    raw : bool
        The text of `prompt_column` or `template` is to be gone on with; otherwise it is a user's message.
    n : int
        Answers to each row. More than one come as lists.
    seed : int, optional
        Each row gets a seed of its own from it, and from its value of `id_column`. None: a new one for each actor. Either way
        the column `seed` has it.
    id_column : str, optional
        The column that tells rows apart. None: `custom_id` if there is one; else rows with equal prompts have equal seeds.
        A row that is computed again, after a machine was lost, has the same seed as before.
    prefix : str
        Put before the names of the new columns, as where the dataset has a column `text` already.
    load : mapping, optional
        Options of :class:`lfmfast.Model`. Threads are those of the actor's CPUs if nothing is said, and so are shares of the
        memory; the model is on a GPU if the actor has one.
    hub : mapping, optional
        Options of :meth:`lfmfast.Model.from_pretrained`: `token`, `revision`, `offline`, `cache_dir`.
    **options
        Of :meth:`lfmfast.Model.stream`, for all rows: `max_tokens`, `stop`, `temperature`, `json_schema`, `regex`, ...

    Raises
    ------
    ParameterError
        An option is unknown or out of its limits, or the dataset lacks a column.
    ModelLoadError, HubError
        There is no such model.
    """

    def __init__(self, model: str, *, prompt_column: str | None = None, template: str | None = None,
                 system_prompt: str | None = None, raw: bool = False, n: int = 1, seed: int | None = None,
                 id_column: str | None = None, prefix: str = "", load: Mapping[str, Any] | None = None,
                 hub: Mapping[str, Any] | None = None, **options: Any) -> None:  # fmt: skip
        if prompt_column is not None and template is not None:
            raise ParameterError("prompt_column and template can't be given together")
        if raw and prompt_column is None and template is None:
            raise ParameterError("raw needs prompt_column or template")
        check_int("n", n, 1, N_MAX)
        if unknown := sorted(options.keys() - (OPTIONS - {"seed"})):
            raise ParameterError(f"there is no option {unknown[0]}")
        self._id, self._prefix, self._several = id_column, prefix, n > 1
        self._columns = template_columns(template) if template is not None else prompt_column and [prompt_column]
        self._form = Form(seed=secrets.randbelow(2**32 - 1) if seed is None else seed, options=options, n=n,
                          column=prompt_column, template=template, system=system_prompt, raw=raw, table=True)  # fmt: skip
        given = {"max_stall_ms": MAX_STALL_MS, **_share(), **(load or {})}
        self._model = Model(model, **given) if Path(model).is_file() else Model.from_pretrained(model, **(hub or {}), **given)
        try:
            self._model._options(**{name: value for name, value in options.items() if name not in OF_PROMPT})
        except BaseException:
            self._model.close()
            raise

    def __call__(self, batch: Any) -> Any:
        """Answer a batch of rows.

        Parameters
        ----------
        batch : dict of arrays, pyarrow.Table, or pandas.DataFrame
            Whatever the `batch_format` of `map_batches` gives.

        Returns
        -------
        pyarrow.Table
            The same rows in the same order, with the new columns.
        """
        arrow: Any = importlib.import_module("pyarrow")
        table = _table(batch, arrow)
        requests = [*self._requests(table)]
        rows: list[dict[str, Any]] = [{}] * len(requests)

        def finish(request: Request, answers: list[Completion]) -> None:
            row = as_row(columns_of(request, answers, self._model, self._several), several=self._several)
            error = request.error
            rows[request.number - 1] = {**row, "error": error and (str(error) or type(error).__name__)}

        requests.sort(key=lambda request: request.key)  # prompts that begin alike one after the other
        Answering(self._model, finish).run(requests)
        for name, kind in answer_columns(several=self._several):
            table = table.append_column(self._prefix + name, arrow.array([row[name] for row in rows], kind))
        return table

    def _requests(self, table: Any) -> Iterator[Request]:
        known = table.column_names
        taken = [self._prefix + name for name, _ in answer_columns(several=self._several)]
        if clash := [name for name in taken if name in known]:
            raise ParameterError(f"the dataset has a column {clash[0]} already: give prefix='answer_', or the like")
        wanted = self._columns or [name for name in (_BODY if "body" in known else ("messages", "prompt")) if name in known]
        id_column = "custom_id" if self._id is None and "custom_id" in known else self._id
        missing = [name for name in (*wanted, id_column) if name is not None and name not in known]
        if missing or not wanted:
            which = missing[0] if missing else "messages or prompt"
            raise ParameterError(f"the dataset has no column {which}; it has {', '.join(known)}")
        ids = [None] * table.num_rows if id_column is None else table.column(id_column).to_pylist()
        for i, values in enumerate(table.select(wanted).to_pylist()):
            row = {name: _plain(value) for name, value in values.items()}
            if "body" in wanted:
                row["custom_id"] = str(ids[i])
                row["body"] = _without_nulls(row["body"])
            request = self._form.read(Record(i + 1, b"", 1, row))
            name = request.key if ids[i] is None else ids[i]
            if request.seed == self._form.seed_of(i + 1):  # the row says none
                request.seed = self._form.seed_of(name)
            yield request


def resources(concurrency: int | tuple[int, int] = 1, *, num_cpus: float | None = None, num_gpus: float = 0) -> dict[str, Any]:
    """Arguments of `map_batches` that say what each actor needs: `concurrency`, `num_cpus` and `num_gpus`.

    Parameters
    ----------
    concurrency : int, or pair of int
        Actors, or the least and most of them.
    num_cpus : float, optional
        Of each actor. None: as many as all of them can have, with one left for reading and writing the data: an actor that
        takes the last one would wait for its rows for ever.
    num_gpus : float
        Of each actor; 0: it computes on its CPUs.

    Raises
    ------
    ParameterError
        The cluster has too few CPUs.

    Examples
    --------
    >>> resources(2, num_cpus=4)
    {'concurrency': 2, 'num_cpus': 4, 'num_gpus': 0}
    """
    n = concurrency if isinstance(concurrency, int) else max(concurrency)
    check_int("concurrency", n, 1)
    if num_cpus is None:
        ray: Any = importlib.import_module("ray")
        if not ray.is_initialized():
            ray.init()
        num_cpus = _cpus_of_each([node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["Alive"]], n)
    return {"concurrency": concurrency, "num_cpus": num_cpus, "num_gpus": num_gpus}


def _cpus_of_each(nodes: list[float], n_actors: int) -> float:
    """The most CPUs that each of the actors can have, a whole number or a fraction of one, with one left on the largest node.

    >>> _cpus_of_each([8, 4], 3), _cpus_of_each([2], 2), _cpus_of_each([16], 1)
    (3, 0.5, 15)
    """
    free = sorted(nodes)
    if free:
        free[-1] -= 1
    sizes: list[float] = [*range(int(max(free, default=0)), 0, -1), *(1 / parts for parts in range(2, 17))]
    for size in sizes:
        if sum(math.floor(cpus / size) for cpus in free) >= n_actors:
            return size
    raise ParameterError(f"the cluster has {sum(nodes):g} CPUs, which is too few for {n_actors} actors, "
                         "and one CPU to read and write the data")  # fmt: skip


def _share() -> dict[str, Any]:
    """How the model is loaded for the CPUs, and the GPU, of the actor that this runs in."""
    ray: Any = sys.modules.get("ray")  # an actor has it
    context = ray.get_runtime_context() if ray is not None and ray.is_initialized() else None
    if context is None or context.get_actor_id() is None:
        return {}
    given = context.get_assigned_resources()
    cpus = float(given.get("CPU", 0.0)) or 1.0
    return {"n_threads": threads_of(cpus), "n_gpu_layers": -1 if given.get("GPU") else 0,
            "cache_bytes": int(default_cache_bytes() * min(1.0, cpus / cpu_count()))}  # fmt: skip


def _table(batch: Any, arrow: Any) -> Any:
    """A batch of any format as a pyarrow.Table."""
    if isinstance(batch, arrow.Table):
        return batch
    block: Any = importlib.import_module("ray.data.block")
    table = block.BlockAccessor.batch_to_block(batch)
    return table if isinstance(table, arrow.Table) else arrow.Table.from_pandas(table, preserve_index=False)


def _plain(value: Any) -> Any:
    """An array as lists."""
    return value.tolist() if hasattr(value, "tolist") else value


def _without_nulls(value: Any) -> Any:
    """A body out of a table, where each has all the fields that any of them has."""
    if isinstance(value, dict):
        return {name: _without_nulls(part) for name, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value
