from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ratchet.config import TaskConfig
from ratchet.errors import TaskError
from ratchet.tasks.base import Task
from ratchet.tasks.registry import build_task

ROWS = [{"prompt": f"{n}+1=", "answer": str(n + 1), "level": n % 3} for n in range(7)]
TEXTS = [row["prompt"] for row in ROWS]


def table(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist([dict(row) for row in rows])


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write rows as the suffix says; Arrow as a stream, in batches of two rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(table(rows), path, row_group_size=2)
    elif path.suffix == ".arrow":
        data = table(rows)
        with pa.ipc.new_stream(path, data.schema) as stream:
            stream.write_table(data, max_chunksize=2)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def save(folder: Path, rows: Sequence[Mapping[str, Any]], split: str) -> Path:
    """Lay files out as `Dataset.save_to_disk` does."""
    half = len(rows) // 2
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    write(folder / names[0], rows[:half])
    write(folder / names[1], rows[half:])
    state = {"_data_files": [{"filename": name} for name in names], "_split": split}
    (folder / "state.json").write_text(json.dumps(state), encoding="utf-8")
    return folder


def save_splits(folder: Path, **splits: Sequence[Mapping[str, Any]]) -> Path:
    """Lay files out as `DatasetDict.save_to_disk` does."""
    for name, rows in splits.items():
        save(folder / name, rows, name)
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": list(splits)}))
    return folder


def build(path: Path, reward: str | None = None, **args: Any) -> Task:
    task = build_task(
        TaskConfig(name="dataset", args={"path": str(path), **args}, reward=reward), 0
    )
    task.prompts("train")  # what reads the data
    return task


def texts(task: Task) -> list[str]:
    return [prompt.text for prompt in task.prompts("train")]


@pytest.mark.parametrize("suffix", [".parquet", ".arrow", ".jsonl"])
def test_rows_become_prompts_in_the_order_of_the_file(tmp_path: Path, suffix: str) -> None:
    task = build(write(tmp_path / f"d{suffix}", ROWS), metadata_fields=["level"])
    assert texts(task) == TEXTS
    last = task.prompts("train")[-1]
    assert (last.reference, last.metadata) == ("7", {"level": 0})
    assert task.score(last, " 7\n") == 1.0
    assert task.score(last, "8") == 0.0


def test_the_file_format_of_arrow_is_read_as_its_stream_format(tmp_path: Path) -> None:
    data = table(ROWS)
    with pa.ipc.new_file(tmp_path / "d.arrow", data.schema) as file:
        file.write_table(data, max_chunksize=2)
    assert texts(build(tmp_path / "d.arrow")) == TEXTS


def test_a_saved_dataset_is_read_file_by_file(tmp_path: Path) -> None:
    write(tmp_path / "d" / "cache-1.arrow", ROWS[:1])  # is not of the dataset
    assert texts(build(save(tmp_path / "d", ROWS, "train"))) == TEXTS
    assert texts(build(tmp_path / "d", split="train")) == TEXTS


def test_splits_are_chosen_by_name(tmp_path: Path) -> None:
    path = save_splits(tmp_path / "d", train=ROWS[:4], test=ROWS[4:])
    task = build(path, split="train", eval_split="test")
    assert texts(task) == TEXTS[:4]
    assert [prompt.text for prompt in task.prompts("eval")] == TEXTS[4:]
    assert texts(build(save_splits(tmp_path / "one", train=ROWS))) == TEXTS


@pytest.mark.parametrize(
    "names",
    [
        (
            "data/train-00000-of-00002.parquet",
            "data/train-00001-of-00002.parquet",
            "data/test.parquet",
        ),
        ("train/0000.parquet", "train/0001.jsonl", "test/0000.parquet"),
    ],
)
def test_a_folder_of_files_has_the_splits_that_its_names_say(
    tmp_path: Path, names: Sequence[str]
) -> None:
    for name, rows in zip(names, (ROWS[:2], ROWS[2:5], ROWS[5:]), strict=True):
        write(tmp_path / "d" / name, rows)
    task = build(tmp_path / "d", split="train", eval_split="test")
    assert texts(task) == TEXTS[:5]
    assert [prompt.text for prompt in task.prompts("eval")] == TEXTS[5:]
    with pytest.raises(TaskError, match="several splits; say which: test, train"):
        build(tmp_path / "d")


def test_other_data_may_be_held_out(tmp_path: Path) -> None:
    train, held_out = write(tmp_path / "t.parquet", ROWS[:4]), save(tmp_path / "e", ROWS[4:], "x")
    task = build(train, eval_path=str(held_out))
    assert [prompt.text for prompt in task.prompts("eval")] == TEXTS[4:]
    with pytest.raises(TaskError, match=r"is at .*t\.parquet:1 and at .*t\.parquet:1"):
        build(train, eval_path=str(train))
    with pytest.raises(TaskError, match=r"holdout = 2 and task\.args\.eval_path both say"):
        build(train, eval_path=str(held_out), holdout=2)


def test_fields_are_columns_or_paths_into_them(tmp_path: Path) -> None:
    rows = [
        {
            "messages": [
                {"role": "system", "content": "Add."},
                {"role": "user", "content": f"{n}"},
            ],
            "truth": {"value": f"because\n#### {n + 1}"},
            "key": n,
            "with.dot": n,
        }
        for n in range(3)
    ]
    task = build(
        write(tmp_path / "d.parquet", rows),
        prompt_field="messages",
        answer_field="truth.value",
        answer_after="####",
        id_field="key",
        metadata_fields=["with.dot", "truth"],
    )
    second = task.prompts("train")[1]
    assert (second.prompt_id, second.text, second.reference) == ("1", "Add.\n\n1", "2")
    assert second.metadata == {"with.dot": 1, "truth": {"value": "because\n#### 2"}}


def test_answers_are_not_needed_where_a_reward_scores(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text("def half(prompt, completion):\n    return 0.5\n", encoding="utf-8")
    path = write(tmp_path / "d.parquet", [{"prompt": "Write."}])
    task = build(path, reward=f"{own}:half")
    assert task.prompts("train")[0].reference is None
    with pytest.raises(TaskError, match=r"d\.parquet has no column 'answer'; known here: prompt"):
        build(path)


def test_who_only_scores_never_reads_the_data(tmp_path: Path) -> None:
    config = TaskConfig(name="dataset", args={"path": str(tmp_path / "none")})
    prompt = build(write(tmp_path / "d.jsonl", ROWS)).prompts("train")[0]
    assert build_task(config, 0).score(prompt, "1") == 1.0


@pytest.mark.parametrize(
    ("rows", "args", "words"),
    [
        (ROWS, {"prompt_field": "promt"}, "no column 'promt'; did you mean 'prompt'"),
        (ROWS, {"answer_field": "answer.text"}, "d.parquet:1: there is no field 'answer.text'"),
        (ROWS, {"id_field": "level"}, "d.parquet:4: the id '0' is already taken by .*parquet:1"),
        (ROWS, {"answer_after": "####"}, "d.parquet:1: the answer has no '####' in it"),
        ([{"prompt": "a", "answer": 0.5}], {}, "parquet:1: answer = 0.5 is neither a text nor"),
        (
            [{"prompt": "a", "answer": None}],
            {},
            "parquet:1: there is no answer; give one, or score",
        ),
        ([{"prompt": 3, "answer": "4"}], {}, "parquet:1: the prompt is 3, neither a text nor a"),
        (ROWS, {"split": "train"}, "is one file, which has no splits; leave the split 'train' out"),
        (ROWS, {"holdout": 7}, "holdout = 7 leaves nothing to train on"),
        (ROWS, {"column": "x"}, "unknown key task.args.column"),
        (ROWS[:0], {}, "has no column 'prompt'|there are no lines or rows"),
    ],
)
def test_a_mistake_names_the_place_the_value_and_the_way_out(
    tmp_path: Path, rows: Sequence[Mapping[str, Any]], args: dict[str, Any], words: str
) -> None:
    with pytest.raises(TaskError, match=words):
        build(write(tmp_path / "d.parquet", rows), **args)


def test_data_that_is_not_there_or_damaged_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        TaskError, match=r"task\.args\.path: .*none is not there; data is read from"
    ):
        build(tmp_path / "none")
    with pytest.raises(TaskError, match=r"d\.csv is none of \.parquet, \.arrow, \.jsonl"):
        build(write(tmp_path / "d.csv", ROWS))
    (tmp_path / "empty").mkdir()
    with pytest.raises(TaskError, match=r"holds no .*those there are: none"):
        build(tmp_path / "empty")
    for suffix in (".parquet", ".arrow"):
        whole = write(tmp_path / f"d{suffix}", ROWS).read_bytes()
        (tmp_path / f"d{suffix}").write_bytes(whole[: len(whole) // 2])
        with pytest.raises(TaskError, match=rf"d\{suffix}: cannot be read behind row \d"):
            build(tmp_path / f"d{suffix}")
    saved = save_splits(tmp_path / "s", train=ROWS[:4], test=ROWS[4:])
    with pytest.raises(TaskError, match="has several splits; say which: train, test"):
        build(saved)
    with pytest.raises(TaskError, match="has no split 'tran'; did you mean 'train'"):
        build(saved, split="tran")
    with pytest.raises(TaskError, match="is the one split 'test', not 'train'"):
        build(saved / "test", split="train")
    (saved / "test" / "state.json").write_text('{"_data_files": [{"filename": "../x.arrow"}]}')
    with pytest.raises(TaskError, match="which is not in that folder"):
        build(saved, split="test")
