"""One call of `miles-top soak`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from ..command import Say, at_terminal, terminal
from ..exit_codes import DIFFERS, EXACT
from ..options import EngineOptions
from ..plan import VerifyRequest, make_plan
from ..problems import BadInput
from ..report_file import write_json
from ..weight_update import Way
from .resources import MIB

#: By these a file is known as a report of this command.
REPORT_KEYS = frozenset({"verdict", "rounds", "memory_mib", "handles"})
MOST_ROUNDS = 1_000_000
# More than the longest request needs, and far less than a batch.
OPTIONS = EngineOptions(sglang={"max_total_tokens": 1536, "schedule_conservativeness": 0.05})
# The engine's own switch: it retracts requests at every 40th forward pass, as if its cache were full.
ROLLOUT_ENVIRONMENT = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "40"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakRequest:
    """The flags of `miles-top soak`: a run as of `miles-top verify`, how many rounds, and how weights travel."""

    run: VerifyRequest
    rounds: int
    update: Way
    json: Path | None


def run_soak(request: SoakRequest) -> int:
    """Run, print and write; returns the exit code: 0 passed, 1 a token differs or something grows, 2 refused."""

    def soak(workspace: Path, say: Say) -> int:
        if not 1 <= request.rounds <= MOST_ROUNDS:
            raise BadInput(f"--rounds {request.rounds}: must be 1 to {MOST_ROUNDS}")
        plan = replace(make_plan(request.run, workspace), options=OPTIONS, rollout_environment=ROLLOUT_ENVIRONMENT)
        from .run import WARM_UP
        from .run import soak as run

        found = run(plan, workspace, request.rounds, request.update, say)
        if request.json is not None:
            write_json(found.as_json(), request.json)
        console = terminal()
        reasons = found.reasons()
        for reason in reasons:
            console.print(f"failed: {reason}", style="red", markup=False, highlight=False, soft_wrap=True)
        held = found.usages[-1]
        console.print(
            f"{'failed' if reasons else 'passed'}: {found.mismatches} of {found.tokens} log-probs differ in "
            f"{found.rounds} rounds with {len(found.versions)} versions of the weights; {found.aborted} requests "
            f"aborted, {found.retractions} retracted, {found.cached_tokens} prompt tokens from the cache; "
            f"{held.memory / MIB:.0f} MiB and {held.handles} open files in {held.processes} processes at the end",
            style="bold red" if reasons else "bold green",
            soft_wrap=True,
        )
        if not found.growth_judged:
            console.print(f"growth was not judged: {found.rounds} rounds, of which {2 * WARM_UP} are needed")
        return DIFFERS if reasons else EXACT

    return at_terminal(soak, request.json, REPORT_KEYS)
