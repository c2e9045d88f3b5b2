"""Curves: the right numbers reach the picture, and bad files are named."""

import json

import pytest

from jaxtrain.errors import UserError
from jaxtrain.main import main
from jaxtrain.runs.plot import plot_runs, read_metrics, smooth
from jaxtrain.runs.run_files import write_output


def write_run(folder, losses):
    folder.mkdir()
    with (folder / "metrics.jsonl").open("w") as file:
        for step, loss in enumerate(losses, start=1):
            file.write(json.dumps({"step": step, "time": 1.0, "loss": loss, "mfu": 0.3}) + "\n")
            if step % 10 == 0:
                file.write(json.dumps({"step": step, "eval/loss": loss}) + "\n")
    return folder


def test_metrics_are_read_by_name_without_nulls_and_half_lines(tmp_path):
    run = write_run(tmp_path / "a", [3.0, None, 1.0])
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    assert read_metrics(run)["loss"] == ([1, 3], [3.0, 1.0])
    assert read_metrics(run / "metrics.jsonl")["mfu"] == ([1, 2, 3], [0.3] * 3)


def test_one_and_several_runs_are_drawn(tmp_path):
    from matplotlib.image import imread

    runs = [write_run(tmp_path / "a", [5.0 - i / 20 for i in range(50)])]
    runs.append(write_run(tmp_path / "b", [4.0]))
    plot_runs(runs[:1], tmp_path / "one.png")
    plot_runs(runs, tmp_path / "new/two.png")
    entry, two = imread(tmp_path / "one.png"), imread(tmp_path / "new/two.png")
    assert entry.shape[1] > 1000 and entry[..., :3].min() < 0.2  # something dark was drawn
    assert entry.shape != two.shape or (entry != two).any()


@pytest.mark.parametrize("bad", ["no json\n{}\n", "[1]\n{}\n", '{"loss": 1}\n{"step": 1}\n'])
def test_broken_files_are_named_with_the_line(tmp_path, bad):
    (tmp_path / "metrics.jsonl").write_text(bad)
    with pytest.raises(UserError, match="metrics.jsonl, line 1 is not a line of metrics"):
        plot_runs([tmp_path], tmp_path / "x.png")


def test_missing_empty_and_binary_files_are_named(tmp_path):
    with pytest.raises(UserError, match="metrics.jsonl does not exist"):
        plot_runs([tmp_path], tmp_path / "x.png")
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match="no step was logged yet"):
        plot_runs([tmp_path], tmp_path / "x.png")
    (tmp_path / "metrics.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="is not a line of metrics"):
        plot_runs([tmp_path], tmp_path / "x.png")
    run = write_run(tmp_path / "a", [1.0])
    with pytest.raises(UserError, match="cannot be written"):
        plot_runs([run], tmp_path / "metrics.jsonl" / "x.png")


def test_a_file_that_is_there_is_kept_unless_it_may_go(tmp_path, capsys, monkeypatch):
    """Holds for every verb that writes one file; a refusal comes before any model is loaded."""
    monkeypatch.setattr(
        "jaxtrain.runs.plot.plot_runs", lambda runs, output: write_output(output, b"curves")
    )
    runs = write_run(tmp_path / "a", [1.0, 2.0])
    retained = tmp_path / "kept.txt"
    for words in (
        ["plot", str(runs)],
        ["generate", str(tmp_path / "no model"), "--prompt", "x"],
    ):
        retained.write_text("mine")
        assert main([*words, "--output", str(retained)]) == 2
        assert f"'{retained}' is there already; name another file" in capsys.readouterr().err
        assert main([*words, "--output", str(tmp_path)]) == 2
        assert "is a folder" in capsys.readouterr().err
        assert main([*words, "--output", str(retained / "x")]) == 2
        assert "is no folder" in capsys.readouterr().err
        assert retained.read_text() == "mine"
    (tmp_path / "link.png").symlink_to(retained)
    assert main(["plot", str(runs), "--output", str(tmp_path / "link.png"), "--overwrite"]) == 0
    assert retained.read_bytes() == b"curves" and (tmp_path / "link.png").is_symlink()
    assert main(["plot", str(runs), "--output", "/dev/null"]) == 0
    assert [main(["plot", str(runs)]) for _ in range(2)] == [0, 2], "in no run's folder"
    (runs / "curves.png").unlink()
    (runs / "run.json").write_text(json.dumps({"names": ["metrics.jsonl"]}))
    assert [main(["plot", str(runs)]) for _ in range(2)] == [0, 0]
    assert not list(tmp_path.rglob("*.unfinished"))


def test_smoothing_keeps_a_constant_and_follows_a_step():
    assert smooth([2.0] * 40) == pytest.approx([2.0] * 40)
    curve = smooth([0.0] * 100 + [1.0] * 100)
    assert curve[99] == 0.0 and 0.05 < curve[100] < 0.2 and curve[199] > 0.99
