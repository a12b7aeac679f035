"""`python -m tools.gpu_check`, which is `make gpu-check`."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from . import archive, machine, runner, stages, summary
from .parts import CUT, FAILED, NOT_RUN, Outcome

SECONDS = 470.0  # of a stage: under eight minutes with the last packing


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="make gpu-check", description="What only a machine with a GPU can check.")
    titles = "; ".join(f"{number}: {title}" for number, title in stages.TITLES.items())
    parser.add_argument("--stage", type=int, choices=list(stages.STAGES), help=f"default: all in turn. {titles}")
    parser.add_argument("--rehearse", action="store_true", help="every stage on the CPU, with tiny sizes")
    parser.add_argument("--parts", default="", help="comma-separated: only these parts, and what is built")
    parser.add_argument("--limit", type=float, default=SECONDS, help="seconds per stage")
    parser.add_argument("--folder", type=Path, default=Path("build/gpu-check"), help="for results")
    return parser.parse_args(argv)


def check(stage: int, arguments: argparse.Namespace, about: dict[str, object], stop: runner.Stop) -> list[Outcome]:
    """One stage, from its folder to its summary."""
    folder = arguments.folder / f"stage{stage}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    commit = str(about["commit"])
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if arguments.rehearse:
        environment["OMP_NUM_THREADS"] = "1"  # tiny sizes: threads would only wait for each other
    environment.pop("ACCUMKERNELS_COMMIT", None)  # which may hold no commit at all
    if commit != machine.UNKNOWN:
        environment["ACCUMKERNELS_COMMIT"] = commit
    (folder / "machine.json").write_text(json.dumps(about, indent=1) + "\n")
    capability, gpus = about.get("capability"), int(str(about.get("gpus") or 0))
    setting = stages.Setting(
        *(sys.executable, arguments.rehearse, None if capability is None else str(capability), gpus),
        *(folder.resolve(), environment),
    )
    wanted = [name for name in arguments.parts.split(",") if name]
    parts = [p for p in stages.STAGES[stage](setting) if not wanted or p.name in wanted or p.name.endswith("build")]
    # Somebody else's machine may bring home what lies in $OUT: few files, so the archive and the summary alone.
    home = Path(os.environ.get("OUT") or arguments.folder)
    kind = "rehearsal of " if arguments.rehearse else ""
    title = f"{kind}stage {stage}, {stages.TITLES[stage]}; {about.get('device') or 'CPU'}, torch {about.get('torch')}, "
    title += f"commit {commit}"
    text = ""

    def save(outcomes: list[Outcome]) -> None:
        nonlocal text
        steps = summary.next_steps(stage, outcomes, folder, commit, arguments.rehearse)
        figures = summary.headlines(folder)
        text = f"{summary.table(title, outcomes)}\n"
        simulated = list(summary.beside_simulation(folder))
        for heading, lines in (
            ("One accumulate, gradients cold:", figures),
            ("Bytes per second without torch, as a fraction of a copy's:", simulated),
            ("Next:", steps),
        ):
            text += "".join([f"{heading}\n", *(f"* {line}\n" for line in lines)]) if lines else ""
        (folder / "summary.txt").write_text(text)
        (home / f"gpu-check-stage{stage}.txt").write_text(text)
        left_out = archive.pack(folder, home / f"gpu-check-stage{stage}.tar.gz")
        if left_out:
            text += f"* Too large for the archive: {', '.join(left_out)}.\n"

    home.mkdir(parents=True, exist_ok=True)
    outcomes = runner.run(parts, folder, environment, arguments.limit, stop, save)
    print(f"\n{text}\n{home / f'gpu-check-stage{stage}.tar.gz'}", flush=True)
    return outcomes


def main(argv: Sequence[str] | None = None) -> int:
    """Run one stage or all; the answer is 0 when nothing failed."""
    arguments = parse(argv)
    os.chdir(stages.ROOT)
    about = machine.describe(sys.executable)
    if "error" in about:
        print(f"gpu-check: {sys.executable} has no torch that works: {about['error']}", file=sys.stderr)
        return 1
    if not about["gpus"] and not arguments.rehearse:
        print("gpu-check: torch sees no CUDA GPU; make gpu-check REHEARSE=1 runs it on the CPU", file=sys.stderr)
        return 1
    about["commit"] = machine.commit(stages.ROOT)
    stop = runner.Stop()
    stop.listen()
    outcomes: list[Outcome] = []
    for stage in [arguments.stage] if arguments.stage else list(stages.STAGES):
        if stop.signal is None:
            outcomes += check(stage, arguments, about, stop)
    if stop.signal is not None:
        return 128 + stop.signal
    return int(any(outcome.status in (FAILED, CUT, NOT_RUN) for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
