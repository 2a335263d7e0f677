"""The task "reasoning-gym": procedural problems of the library of that name.

Consumes a dataset's name and parameters, produces distinct problems with verifiable answers; waits
for nothing. A problem is known by its index, from which the library makes it again, so a process
that only scores never builds the prompts. Importing the whole library costs two seconds of CPU, in
each process of a run; one dataset's own module costs a tenth of a second, so that is what is
imported where it stands alone.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Protocol

from pydantic import AfterValidator, Field

from ratchet.errors import TaskError
from ratchet.tasks.arguments import Holdout, TaskArgs, parse_args, suggest
from ratchet.tasks.base import Split
from ratchet.tasks.problems import Splits, problem_id, split_by_text
from ratchet.types import Prompt

_LIBRARY: Final = "reasoning_gym"


def _check_template(value: str) -> str:
    if "{prompt}" not in value:
        msg = 'it must hold the place "{prompt}", where the problem goes'
        raise ValueError(msg)
    return value


class ReasoningGymArgs(TaskArgs):
    """`task.args` of the task "reasoning-gym"."""

    dataset: str
    """A dataset of the library, for example "chain_sum"."""
    size: Annotated[int, Field(gt=0)] = 10_000
    """Problems drawn; the same problem drawn again is dropped."""
    seed: int | None = None
    """Of the draw; by default the run's seed."""
    config: dict[str, Any] = {}
    """The dataset's own parameters, for example {min_terms = 2, max_terms = 2}."""
    prompt: Literal["question", "expression"] = "question"
    """The library's question, or only its arithmetic expression: "12+34=". """
    template: Annotated[str, AfterValidator(_check_template)] = "{prompt}"
    """Text around the prompt, for example "{prompt} Reply with the number only." """
    binary: bool = True
    """1.0 for what the library scores 1.0, else 0.0. Its partial scores can be traps: some datasets
    pay most of the reward for a right answer followed by anything.
    """
    holdout: Holdout = 0.1


class _Dataset(Protocol):
    """What is used of `reasoning_gym.dataset.ProceduralDataset`."""

    def __getitem__(self, idx: int) -> dict[str, Any]: ...

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float: ...


class ReasoningGymTask:
    """Distinct problems of one dataset, scored by the library."""

    def __init__(self, args: ReasoningGymArgs, seed: int) -> None:
        self._args = args
        self._dataset = _create(args, seed if args.seed is None else args.seed)
        self._text(self._entry(0))  # a wrong prompt style or parameter shows here, not later

    def prompts(self, split: Split) -> tuple[Prompt, ...]:
        """Return the prompts of a split, in the order of the draw."""
        return self._splits.of(split)

    def score(self, prompt: Prompt, completion: str) -> float:
        """Return the library's score of the completion, white space at both ends aside; 1.0 or 0.0
        where `binary`.

        Raises:
            TaskError: if the library does not make the same problem again.
        """
        entry = self._entry(prompt.metadata["index"])
        if self._text(entry) != prompt.text:
            msg = (
                f"task.args.dataset = {self._args.dataset!r} makes another problem from the same"
                f" index and seed in this process: {self._text(entry)!r} instead of {prompt.text!r}"
            )
            raise TaskError(msg)
        score = self._dataset.score_answer(completion.strip(), entry)
        return float(score == 1.0) if self._args.binary else score

    @cached_property
    def _splits(self) -> Splits:
        prompts: dict[str, Prompt] = {}
        for index in range(self._args.size):
            entry = self._entry(index)
            text = self._text(entry)
            if text not in prompts:
                answer = entry.get("answer")
                prompts[text] = Prompt(
                    prompt_id=problem_id(text),
                    text=text,
                    reference=answer if isinstance(answer, str) else None,
                    metadata={"index": index},
                )
        return split_by_text(tuple(prompts.values()), self._args.holdout)

    def _entry(self, index: int) -> dict[str, Any]:
        try:
            return self._dataset[index]
        except Exception as error:
            msg = (
                f"task.args.dataset = {self._args.dataset!r}: problem {index} with task.args.config"
                f" = {self._args.config}: {type(error).__name__}: {error}"
            )
            raise TaskError(msg) from error

    def _text(self, entry: Mapping[str, Any]) -> str:
        text: str = entry["question"]
        if self._args.prompt == "expression":
            expression = entry["metadata"].get("expression")
            if not isinstance(expression, str):
                msg = (
                    f'task.args.prompt = "expression": the dataset {self._args.dataset!r} has no'
                    ' expressions; use "question"'
                )
                raise TaskError(msg)
            text = expression.replace(" ", "") + "="
        return self._args.template.replace("{prompt}", text)


def build_reasoning_gym(args: Mapping[str, Any], seed: int) -> ReasoningGymTask:
    """Build the task from `task.args`.

    Raises:
        TaskError: if an argument is wrong, or the library is not installed.
    """
    return ReasoningGymTask(parse_args(ReasoningGymArgs, args), seed)


def _create(args: ReasoningGymArgs, seed: int) -> _Dataset:
    dataset_class, config_class = _find(args.dataset)
    known = [field.name for field in dataclasses.fields(config_class)]
    for key in args.config:
        if key in ("seed", "size"):
            msg = f"task.args.config.{key}: give it as task.args.{key}"
            raise TaskError(msg)
        if key not in known:
            msg = f"unknown key task.args.config.{key}; {suggest(key, known)}"
            raise TaskError(msg)
    try:
        config = config_class(**args.config, seed=seed, size=args.size)
        dataset: _Dataset = dataset_class(config)
    except Exception as error:  # the library asserts its parameters
        msg = f"task.args.config = {args.config}: {str(error) or type(error).__name__}"
        raise TaskError(msg) from error
    return dataset


def _find(name: str) -> tuple[type, type]:
    """Return the classes of a dataset and of its parameters."""
    if find_spec(_LIBRARY) is None:
        msg = (
            'task.name = "reasoning-gym": the library is not installed;'
            " pip install 'ratchet-rl[reasoning-gym]'"
        )
        raise TaskError(msg)
    alone = _import_alone(name)
    if alone is not None:
        return alone
    importlib.import_module(_LIBRARY)
    datasets: dict[str, tuple[type, type]] = importlib.import_module(f"{_LIBRARY}.factory").DATASETS
    if name not in datasets:
        msg = f"task.args.dataset = {name!r} is not one of the library's; " + suggest(
            name, list(datasets)
        )
        raise TaskError(msg)
    return datasets[name]


def _import_alone(name: str) -> tuple[type, type] | None:
    """Import only the module that registers the dataset; None where that does not work out."""
    spec = find_spec(_LIBRARY)
    if _LIBRARY in sys.modules or spec is None or not name.isidentifier():
        return None
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    found = [path for folder in folders for path in folder.glob(f"*/{name}.py")]
    if len(found) != 1:
        return None
    category = f"{_LIBRARY}.{found[0].parent.name}"
    with _bare_packages(_LIBRARY, category):
        try:
            importlib.import_module(f"{category}.{name}")
        except ImportError:  # it leans on the rest of the library
            return None
        datasets = importlib.import_module(f"{_LIBRARY}.factory").DATASETS
        classes: tuple[type, type] | None = datasets.get(name)
        return classes


@contextmanager
def _bare_packages(root: str, category: str) -> Iterator[None]:
    """Let modules of the two packages be imported without the packages' own `__init__`.

    Nothing of it stays in `sys.modules`: a later import of the library gets the whole of it.
    """
    try:
        for name in (root, category):
            spec = find_spec(name)
            if spec is None:
                msg = f"no package {name!r}"
                raise ImportError(msg)
            sys.modules[name] = module_from_spec(spec)
        yield
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == root]:
            del sys.modules[name]
