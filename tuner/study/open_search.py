"""Opens the search of a study: folder, space, objective, proposer, and the target of its trials."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loadgen.config.bench_config import BenchConfig
from loadgen.progress import ProgressDisplay
from tuner.config import TuneConfig
from tuner.errors import SpaceError
from tuner.proposers.one_knob import OneKnobAtATime
from tuner.proposers.proposal import Proposer
from tuner.servers.select import server_of
from tuner.space.search_space import SearchSpace
from tuner.study.identity import identity_of, params_of
from tuner.study.prepare_study import PreparedStudy, without_effect
from tuner.study.study_folder import STUDY_FILE, StudyFolder
from tuner.study.study_search import StudySearch
from tuner.trial.early_stop import limits_out_of_reach
from tuner.trial.evaluate import TrialSetup, evaluate
from tuner.trial.measure import Evaluate
from tuner.trial.objective import Objective


def open_search(prepared: PreparedStudy, progress: ProgressDisplay, *, is_leader: bool = True) -> StudySearch:
    """The search of a prepared study. A leader stores the config in the folder. Raises StudyError, SpaceError."""
    config, load = prepared.config, prepared.load
    server = server_of(config.server)
    setup = TrialSetup(
        load,
        config.server.ready_timeout_s,
        progress,
        server,
        limits_out_of_reach(Objective.of(config.objective).limits),
        server.keep_warm(set(params_of(config))),
        with_steps=server.writes_steps,
    )
    search = make_search(
        prepared.folder, config, setup, without_effect=without_effect(config, load), is_leader=is_leader
    )
    if is_leader:
        search.files.update(STUDY_FILE, {"config": json.loads(config.model_dump_json(by_alias=True))})
    return search


def make_search(
    folder: Path,
    config: TuneConfig,
    setup: TrialSetup,
    evaluate: Evaluate = evaluate,
    *,
    without_effect: Mapping[str, str] | None = None,
    is_leader: bool = True,
) -> StudySearch:
    """The search in a new or existing folder. `without_effect`: parameters without effect here, name to reason.

    Raises StudyError if the folder has another study, SpaceError if no parameter can be searched.
    """
    fixed = {"model_id": config.server.model_id, **config.server.fixed}
    server = server_of(config.server)
    server.validate(fixed)
    params = params_of(config)
    whole = SearchSpace.of(params, config.forbid, server.known)
    left_out = {each.name: "it has only one value here" for each in whole.parameters if each.cannot_vary}
    left_out |= dict(without_effect or {})
    space = SearchSpace(tuple(each for each in whole.parameters if each.name not in left_out), whole.forbidden)
    if not space.parameters:
        raise SpaceError("no parameter to search: every one is fixed, has only one value, or has no effect here")
    files = StudyFolder(folder)
    files.claim(identity_of(config, params, setup.load), is_leader=is_leader, is_mixed=config.study.mixed)
    objective = Objective.of(config.objective)
    return StudySearch(
        folder,
        config,
        setup,
        objective,
        space,
        fixed,
        left_out,
        config.study.num_trials(len(space.parameters)),
        evaluate,
        make_proposer(config, space, fixed, objective, setup.load, files),
        is_leader,
    )


def make_proposer(
    config: TuneConfig,
    space: SearchSpace,
    fixed: Mapping[str, Any],
    objective: Objective,
    load: BenchConfig,
    files: StudyFolder,
) -> Proposer | None:
    """The proposer of a study; None if only its sampler proposes."""
    if config.study.sampler == "coordinate":
        return OneKnobAtATime(space, fixed, objective, server_of(config.server))
    if not config.uses_simulator:
        return make_surrogate(config, space, fixed, objective, files) if config.uses_surrogate else None
    by_rank = config.study.simulator == "rank"
    if config.study.cost is not None:
        from tuner.simulator.outside.twin_costs import twin_costs
        from tuner.simulator.outside.twin_proposer import TwinProposer

        server = server_of(config.server)
        costs, meanings = twin_costs(Path(config.study.cost), server, [each.name for each in space.parameters])
        fallback = make_surrogate(config, space, fixed, objective, files)
        return TwinProposer(
            files.path, costs, meanings, server, load, space, fixed, objective, fallback, files.deviation,
            by_rank, config.study.seed,
        )  # fmt: skip
    from tuner.simulator.proposer import SimulatorProposer

    return SimulatorProposer(files.path, load, space, fixed, objective, files.deviation, by_rank, config.study.seed)


def make_surrogate(
    config: TuneConfig, space: SearchSpace, fixed: Mapping[str, Any], objective: Objective, files: StudyFolder
) -> Proposer:
    """The proposer of a server without step traces and without `cost`."""
    from tuner.proposers.surrogate import SurrogateProposer

    server = server_of(config.server)
    study = config.study
    return SurrogateProposer(space, fixed, objective, server, files.deviation, study.seed, study.skip_dominated)
