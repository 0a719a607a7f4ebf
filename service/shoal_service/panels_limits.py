"""What the limits panel shows: a job's limits, and what of its budget and time is left. Reading them back from its
form, too. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from shoal_planner.errors import InvalidField
from shoal_planner.limits import deadline_at_s
from shoal_service.bodies import NewLimits
from shoal_service.errors import invalid_field
from shoal_service.spending import Spending

_HOUR_S = 3600.0
_WHOLE = re.compile(r"-?[0-9]{1,9}")
FIELDS = ("budget_usd", "max_price_per_hour", "max_devices", "deadline", "priority")


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """`spent_usd` is None where no node has a price. `lasts_s`: for how long the rest lasts at what nodes cost now."""

    budget_usd: float
    spent_usd: float | None
    left_usd: float | None
    share: float
    lasts_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsPanel:
    """`fields` are the values of the form, as text; empty: no limit. `deadline_in_s` is negative once it has passed."""

    fields: Mapping[str, str]
    budget: Budget | None
    deadline: str | None
    deadline_in_s: float | None


def limits_panel(spec: Mapping[str, Any], spent: Spending, now_s: float) -> LimitsPanel:
    """Of a job's spec."""
    limits = spec.get("limits") or {}
    values = {**limits, "priority": spec.get("priority", "normal")}
    deadline = limits.get("deadline")
    return LimitsPanel(
        fields={name: "" if values.get(name) is None else _text(values[name]) for name in FIELDS},
        budget=budget_of(spec, spent),
        deadline=deadline,
        deadline_in_s=None if deadline is None else deadline_at_s(deadline) - now_s,
    )


def budget_of(spec: Mapping[str, Any], spent: Spending) -> Budget | None:
    """None of a job without one."""
    given = (spec.get("limits") or {}).get("budget_usd")
    if given is None:
        return None
    budget_usd, spent_usd = float(given), spent.usd
    left_usd = None if spent_usd is None else max(0.0, budget_usd - spent_usd)
    rate = spent.usd_per_hour
    return Budget(
        budget_usd=budget_usd,
        spent_usd=spent_usd,
        left_usd=left_usd,
        share=0.0 if spent_usd is None else min(1.0, spent_usd / budget_usd),
        lasts_s=None if not left_usd or not rate else left_usd / rate * _HOUR_S,
    )


def _text(value: Any) -> str:
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def limits_of_form(form: Mapping[str, str]) -> NewLimits:
    """An empty field takes its limit away, one that is not there leaves it. Raises BadInput, naming the field."""
    given: dict[str, Any] = {name: form[name].strip() or None for name in FIELDS if name in form}
    priority = given.pop("priority", None)
    if priority is not None:
        given["priority"] = int(priority) if _WHOLE.fullmatch(priority) else priority
    try:
        return NewLimits.model_validate(given, strict=False)  # all that forms send is text
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        message = first["msg"][:1].lower() + first["msg"][1:]
        raise invalid_field(InvalidField(name, form.get(name), message)) from error
