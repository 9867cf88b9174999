"""What was decided, why, and what to do next, in one plain sentence each."""

import math
from collections.abc import Sequence

from ..harness.format import count, fixed, percent, speed_up, speed_up_interval
from .outcomes import Attribution, Crowding, DepthOutcome, FirstTokenEffect, GateOutcome, OutputOutcome, Verdict
from .output.check import SAYS_LITTLE

NEGLIGIBLE = 0.002  # effects below 0.2 % are "unchanged" in words
SAID_AS_A_FACTOR = 1.0  # effects from here on: "3.1x later" reads better than "210.0 % later"


def with_words(outcome: GateOutcome) -> GateOutcome:
    """The outcome with its sentence, its next step and every depth's attribution in words."""
    depths = tuple(
        depth.model_copy(update={"words": in_words(depth.point_estimate, depth.attribution)})
        for depth in outcome.depths
    )
    outcome = outcome.model_copy(update={"depths": depths, "order_words": order_words(outcome)})
    return outcome.model_copy(update={"sentence": sentence(outcome), "next_step": next_step(outcome)})


def sentence(outcome: GateOutcome) -> str:
    """One sentence: the verdict and its reason."""
    return f"{outcome.verdict}: {_reason(outcome)}."


def next_step(outcome: GateOutcome) -> str:
    """One sentence: what a person does now."""
    candidate = _check_of(outcome, outcome.candidate)
    match outcome.verdict:
        case Verdict.PASS:
            return _next_step_of_pass(outcome)
        case Verdict.FAIL if candidate is not None and candidate.verdict is Verdict.FAIL:
            return f"Correct the output first ({_where(candidate)}); speed counts only after that."
        case Verdict.FAIL:
            return f"Look for the cost at depth {count(_worst(outcome.depths).depth)}: {_worst(outcome.depths).words}."
        case Verdict.VOID if outcome.crowding and len(outcome.void_reasons) == len(outcome.crowding):
            return _next_step_of_crowding(outcome.crowding[0])
        case Verdict.VOID:
            return _next_step_of_void(outcome)
        case Verdict.INCONCLUSIVE if outcome.not_restarted:
            return _next_step_without_restarts(outcome)
    return _next_step_of_inconclusive(outcome)


def effect_words(depth: DepthOutcome) -> str:
    """ "3.1 % slower per token (+2.0 % to +4.2 %) at depth 8,192"."""
    effect = depth.point_estimate
    direction = "slower" if effect > 0 else "faster"
    bounds = "interval unknown"
    if depth.low is not None and depth.high is not None:
        bounds = f"{percent(depth.low)} to {percent(depth.high)}"
    return f"{unsigned(effect)} {direction} per token ({bounds}) at depth {count(depth.depth)}"


def order_words(outcome: GateOutcome) -> str:
    """What being started second did, at the depth where it did most; "" up to the margin, or where it is not known."""
    known = [(abs(depth.order_effect.effect), depth) for depth in outcome.depths if depth.order_effect is not None]
    size, worst = max(known, key=lambda pair: pair[0], default=(0.0, None))
    if worst is None or worst.order_effect is None or size <= outcome.margin:
        return ""
    order = worst.order_effect
    bounds = "" if order.low is None or order.high is None else f" ({percent(order.low)} to {percent(order.high)})"
    direction = "slower" if order.effect > 0 else "faster"
    return (
        f"The engine started second in a launch ran {unsigned(order.effect)} {direction}{bounds} at depth "
        f"{count(worst.depth)}; removed from the estimate."
    )


def first_token_words(outcome: GateOutcome) -> str:
    """The paired ratio at every depth with its interval: "First token … ×3.10 (3.02–3.19) at depth 32."; "" without."""
    told = [
        f"{_ratio(depth.first_token)} at depth {count(depth.depth)}" for depth in outcome.depths if depth.first_token
    ]
    if not told:
        return ""
    return f"First token, {outcome.candidate} to {outcome.baseline} (not gated): {', '.join(told)}."


def later_first_token(outcome: GateOutcome) -> str:
    """ "first token 3.1x later at depth 32: not gated", where the whole interval lies above the margin; else ""."""
    late = [(depth, effect) for depth in outcome.depths if (effect := _is_late(depth, outcome.margin))]
    if not late:
        return ""
    worst, effect = max(late, key=lambda pair: pair[1].effect)
    size = f"{fixed(1 + effect.effect, 1)}x" if effect.effect >= SAID_AS_A_FACTOR else unsigned(effect.effect)
    elsewhere = f" and at {len(late) - 1} more depth{'s' if len(late) > 2 else ''}" if len(late) > 1 else ""
    return f"first token {size} later at depth {count(worst.depth)}{elsewhere}: not gated"


def unsigned(fraction: float) -> str:
    """The size of a change: "2.1 %"."""
    return f"{fixed(abs(fraction) * 100, 1)} %"


def duration(seconds: float) -> str:
    """ "about 3 minutes"."""
    if seconds < 90:
        return f"about {max(1, round(seconds))} seconds"
    if seconds < 5400:
        return f"about {round(seconds / 60)} minutes"
    return f"about {seconds / 3600:.1f} hours"


def _reason(outcome: GateOutcome) -> str:
    candidate, baseline = _check_of(outcome, outcome.candidate), _check_of(outcome, outcome.baseline)
    if candidate is not None and candidate.verdict is Verdict.FAIL:
        also = "; the baseline's output is wrong too" if baseline and baseline.verdict is Verdict.FAIL else ""
        return f"the output of {outcome.candidate} is wrong: {candidate.reason}{also}"
    if outcome.void_reasons:
        more = f" (and {len(outcome.void_reasons) - 1} more)" if len(outcome.void_reasons) > 1 else ""
        return f"the measurement is void: {outcome.void_reasons[0]}{more}"
    if outcome.verdict is Verdict.VOID:
        return _void_by_baseline(outcome, baseline)
    later = f"; {late}" if (late := later_first_token(outcome)) else ""
    if outcome.verdict is Verdict.FAIL:
        return f"{_slower(outcome)}{later}"
    if outcome.verdict is Verdict.PASS:
        return f"{_passed(outcome)}{later}"
    if outcome.not_restarted:
        return f"{_without_restarts(outcome)}{later}"
    return f"{_undecided(outcome)}{later}"


def _void_by_baseline(outcome: GateOutcome, baseline: OutputOutcome | None) -> str:
    if baseline is not None and baseline.verdict is Verdict.FAIL:
        return f"the output of the baseline {outcome.baseline} is wrong, so its speed means nothing: {baseline.reason}"
    if baseline is not None and baseline.verdict is Verdict.VOID:
        return f"the output of {outcome.baseline} cannot be judged: {baseline.reason}"
    return "there is no pair to decide on"


def _slower(outcome: GateOutcome) -> str:
    over = [depth for depth in outcome.depths if depth.low is not None and depth.low > outcome.margin]
    worst = _worst(over)
    elsewhere = f" and at {len(over) - 1} more depth{'s' if len(over) > 2 else ''}" if len(over) > 1 else ""
    beyond = f"beyond the margin of {unsigned(outcome.margin)}"
    return f"{outcome.candidate} is {effect_words(worst)}{elsewhere}, {beyond}: {worst.words}"


def _passed(outcome: GateOutcome) -> str:
    worst = max(outcome.depths, key=lambda depth: depth.high or 0.0)
    better = ""
    if outcome.improved_depths:
        better = f"; IMPROVED at depth {', '.join(count(depth) for depth in outcome.improved_depths)}"
    return (
        f"{outcome.candidate} is nowhere slower per token than the margin of {unsigned(outcome.margin)} (highest upper "
        f"bound {percent(worst.high)} at depth {count(worst.depth)}), and {_output_words(outcome)}{better}"
    )


def _output_words(outcome: GateOutcome) -> str:
    check = _check_of(outcome, outcome.candidate)
    if check is None or not (check.is_structured or check.divergences):
        return "its output is right"
    structured = f"the structured checkpoint's, {SAYS_LITTLE}"
    if not check.divergences:
        return f"every token is {structured}"
    other = f"; every other token is {structured}" if check.is_structured else ""
    return f"its output holds {check.allowed_words}{other}"


def _undecided(outcome: GateOutcome) -> str:
    unchecked = _unchecked(outcome)
    if outcome.speed_verdict is Verdict.PASS:
        return f"no slowdown was found, but the output was not checked ({unchecked}), and no speed counts without it"
    if not outcome.depths:
        return "nothing was measured yet"
    worst = max(outcome.depths, key=lambda depth: depth.high if depth.high is not None else float("inf"))
    also = f"; the output was not checked either ({unchecked})" if unchecked else ""
    return (
        f"after {outcome.launches} launches {outcome.candidate} is {effect_words(worst)}, "
        f"which does not settle which side of {unsigned(outcome.margin)} it is on{also}"
    )


def _next_step_of_pass(outcome: GateOutcome) -> str:
    """Where the gate did not see everything, what is left for a person to settle."""
    candidate = _check_of(outcome, outcome.candidate)
    left = []
    if candidate is not None and candidate.is_structured:
        left.append("its numerics are right too (compare again with `--config text`)")
    if candidate is not None and candidate.allowed_words:
        left.append(f"you accept what diverged ({candidate.allowed_words})")
    if later_first_token(outcome):
        left.append("you accept its later first token")
    return f"The change may go in if {' and '.join(left)}." if left else "Nothing to do: the change may go in."


def _next_step_of_void(outcome: GateOutcome) -> str:
    baseline = _check_of(outcome, outcome.baseline)
    if not outcome.void_reasons and baseline is not None and baseline.verdict is Verdict.VOID and baseline.remedy:
        return baseline.remedy
    return "Put right what is named above, then measure again; a void measurement says nothing about the change."


def _remedy(outcome: GateOutcome) -> str:
    """What lets the output check judge: the candidate's where both could not."""
    checks = [_check_of(outcome, build) for build in (outcome.candidate, outcome.baseline)]
    remedies = [check.remedy for check in checks if check is not None and check.remedy]
    return remedies[0] if remedies else "Have every token of both builds checked: compare again."


def _without_restarts(outcome: GateOutcome) -> str:
    """Figures that hold for the servers as they happened to start, and decide nothing beyond that."""
    servers = " and ".join(outcome.not_restarted)
    found = f"{outcome.candidate} is {effect_words(_worst(outcome.depths))}, but " if outcome.depths else ""
    unchecked = _unchecked(outcome)
    also = f"; the output was not checked either ({unchecked})" if unchecked else ""
    was = "were" if len(outcome.not_restarted) > 1 else "was"
    return (
        f"{found}{servers} {was} not restarted between launches, so how much of the difference is the luck of one "
        f"start is unknown{also}"
    )


def _next_step_of_crowding(crowding: Crowding) -> str:
    return (
        "Measure one engine at a time: set `residency: alternate` in the gate's configuration and compare again, "
        f"because the engine of {' and '.join(crowding.busy)} uses the processor while it has nothing to do "
        f"(in {count(crowding.crowded)} of {count(crowding.streams)} streams of {crowding.build})."
    )


def _next_step_without_restarts(outcome: GateOutcome) -> str:
    step = (
        "Let the tool start both engines: name builds (a YAML file with `engine: kernarc` or `engine: vllm`, or "
        "git:REF) in place of endpoint:URL, and compare again."
    )
    if _unchecked(outcome):
        step += " The output alone can be judged before: set output_check.reference_model to the checkpoint served."
    return step


def _next_step_of_inconclusive(outcome: GateOutcome) -> str:
    if outcome.speed_verdict is not Verdict.INCONCLUSIVE:
        return _remedy(outcome)
    if outcome.launches < 3:
        return "Measure on: fewer than 3 launches decide nothing."
    if outcome.launches_needed is None:
        return (
            "No practical number of launches settles this: the effect lies on the margin, or the machine is too noisy "
            "(see `kernarc-gate calibrate --build`); choose another margin or a quieter machine."
        )
    time = (
        "" if outcome.seconds_a_launch is None else f", {duration(outcome.launches_needed * outcome.seconds_a_launch)}"
    )
    return (
        f"About {outcome.launches_needed} launches would settle it{time}: "
        f"compare again with `--looks {outcome.launches_needed}`, or set `looks` in the gate's configuration."
    )


def _check_of(outcome: GateOutcome, build: str) -> OutputOutcome | None:
    return next((check for check in outcome.output_checks if check.build == build), None)


def _unchecked(outcome: GateOutcome) -> str:
    for build in (outcome.candidate, outcome.baseline):
        check = _check_of(outcome, build)
        if check is None:
            return f"{build}: not run"
        if check.verdict is not Verdict.PASS:
            return f"{build}: {check.reason}"
    return ""


def _where(check: OutputOutcome) -> str:
    if check.truncated:
        return f"request {check.truncated[0]} was cut short"
    if not check.worst:
        return check.reason
    worst = check.worst[0]
    return f"request {worst.request_id}, output token {worst.position}: {worst.emitted} where {worst.preferred} was due"


def _worst(depths: Sequence[DepthOutcome]) -> DepthOutcome:
    return max(depths, key=lambda depth: depth.point_estimate)


def in_words(effect: float, attribution: Attribution | None) -> str:
    """One clause on where an effect (a fraction, +0.02 = 2 % slower) comes from."""
    if attribution is None:
        return "the events of this server are not steps, so step time and acceptance cannot be told apart"
    step, acceptance = attribution.step_effect, attribution.acceptance_effect
    parts = [_step_words(step), _acceptance_words(acceptance)]
    if abs(effect) < NEGLIGIBLE and max(abs(step), abs(acceptance)) < NEGLIGIBLE:
        return "step time and acceptance are unchanged"
    cause = max((abs(math.log1p(step)), "the step"), (abs(math.log1p(acceptance)), "the acceptance of drafts"))[1]
    return f"{parts[0]}, {parts[1]}: the effect is from {cause}"


def _step_words(effect: float) -> str:
    if abs(effect) < NEGLIGIBLE:
        return "each step takes as long as before"
    return f"each step takes {unsigned(effect)} {'longer' if effect > 0 else 'less'}"


def _acceptance_words(effect: float) -> str:
    """acceptance_effect +x means tokens a step fell to 1 / (1 + x)."""
    if abs(effect) < NEGLIGIBLE:
        return "as many tokens a step"
    tokens = 1 / (1 + effect) - 1
    return f"{unsigned(tokens)} {'fewer' if tokens < 0 else 'more'} tokens a step"


def _is_late(depth: DepthOutcome, margin: float) -> FirstTokenEffect | None:
    effect = depth.first_token
    return effect if effect is not None and effect.low is not None and effect.low > margin else None


def _ratio(effect: FirstTokenEffect) -> str:
    if effect.low is None or effect.high is None:
        return f"{speed_up(1 + effect.effect)} (interval unknown)"
    return f"{speed_up(1 + effect.effect)} ({speed_up_interval(1 + effect.low, 1 + effect.high)})"
