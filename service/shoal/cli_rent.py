"""`shoal rent`: which machines to rent for a job and a budget, without any server."""

from __future__ import annotations

import difflib
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from shoal.cli_input import BadUsage, read_history_of, read_job, read_market, read_profile
from shoal.cli_plan import AsJson, Job, ProfileFile, profile_answer
from shoal.cli_show import calibrated_by, say, show_json, table
from shoal_planner.errors import InvalidField, NoPlanFits
from shoal_planner.market import Market

if TYPE_CHECKING:
    from shoal_planner.preemption import PreemptionRate

app = typer.Typer()


@app.command()
def rent(
    job: Job,
    market: Annotated[str, typer.Option("--market", metavar="FILE", help="Market file, YAML or JSON.")],
    budget: Annotated[float, typer.Option("--budget", metavar="USD_PER_H", help="Most to spend in an hour.")],
    deadline: Annotated[
        float | None, typer.Option(metavar="HOURS", help="Only fleets that are expected to be done by then.")
    ] = None,
    objective: Annotated[
        Literal["throughput", "cost"], typer.Option(help="Most tokens per second, or least dollars per token.")
    ] = "throughput",
    survive: Annotated[
        bool, typer.Option("--survive", help="Only fleets that outlive the loss of any one type of spot nodes.")
    ] = False,
    held: Annotated[
        list[str] | None, typer.Option(metavar="OFFER=COUNT", help="Nodes rented already; kept where that pays.")
    ] = None,
    history: Annotated[
        list[str] | None,
        typer.Option(metavar="[OFFER=]FILE", help="What became of spot nodes of an offer, or of others, as CSV."),
    ] = None,
    done: Annotated[int, typer.Option(metavar="STEPS", help="Steps of the job that are behind it.")] = 0,
    profile: ProfileFile = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the search.")] = 0,
    time_limit: Annotated[float, typer.Option(min=0.001, help="Longest search, in seconds.")] = 60.0,
    as_json: AsJson = False,
) -> None:
    """Choose machines for a job and a budget, among those that a market offers."""
    # The planner loads numpy; commands that only talk to a server need not wait for it.
    from shoal_planner.rent import rent as choose
    from shoal_planner.rent_answers import rent_answer

    spec, offers = read_job(job), read_market(market)
    known = read_profile(profile, offers.overrides)
    counts, rates = _held(held or [], offers), _rates(history or [], offers)
    try:
        result = choose(
            spec,
            offers,
            budget,
            profile=known,
            objective=objective,
            deadline_h=deadline,
            survive=survive,
            previous=counts,
            rates=rates,
            done_steps=done,
            seed=seed,
            time_limit_s=time_limit,
        )
    except NoPlanFits as error:
        raise BadUsage(str(error)) from error
    except InvalidField as error:
        raise BadUsage(f"{market}: {error}" if error.field.startswith(("offers", "devices")) else str(error)) from error
    answer = rent_answer(result, offers, budget_per_hour=budget, seed=seed)
    if profile is not None:
        answer["profile"] = profile_answer(known, profile)
    if as_json:
        show_json(answer)
    else:
        _show(answer, done=done, steps_left=spec.train.steps - done)
    if result.truncated:
        say(f"the search was cut short after {result.search_s:.3g} s; a longer --time-limit may find a better fleet")


def _held(given: list[str], market: Market) -> dict[str, int]:
    found: dict[str, int] = {}
    for entry in given:
        name, text = _pair("--held", entry, market)
        if not (text.isascii() and text.isdigit()):
            raise BadUsage(f"--held {entry}: must be OFFER=COUNT")
        found[name] = int(text)
    return found


def _rates(given: list[str], market: Market) -> dict[str, PreemptionRate]:
    """A history without an offer is that of another pool, and named by its file."""
    from shoal_planner.appraise import offer_rates
    from shoal_planner.pool_history import observe

    pairs = [_pair("--history", entry, market) if "=" in entry else (entry, entry) for entry in given]
    twice = sorted(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
    if twice:
        raise BadUsage(f"--history: {twice[0]} is given twice")
    return offer_rates(market, [observe(read_history_of(name, file)) for name, file in pairs])


def _pair(option: str, entry: str, market: Market) -> tuple[str, str]:
    name, _, rest = entry.partition("=")
    known = [offer.name for offer in market.offers]
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
        raise BadUsage(f"{option} {entry}: {name!r} is not an offer of the market; {hint}")
    return name, rest


def _show(answer: dict[str, Any], *, done: int, steps_left: int) -> None:
    table(
        ("OFFER", "NODES", "DEVICES", "ZONE", "MARKET", "USD/H EACH", "USD/H"),
        (
            (
                entry["offer"],
                entry["count"],
                f"{entry['count'] * entry['devices']} x {entry['device']}",
                entry["zone"],
                "spot" if entry["spot"] else "on demand",
                entry["price_per_hour"],
                entry["count"] * entry["price_per_hour"],
            )
            for entry in answer["fleet"]
        ),
    )
    if answer["alternatives"]:
        print()
        table(
            ("OTHER FLEETS", "USD/H", "TOKENS/S", "USD/M TOKENS", "HOURS"),
            (
                (
                    " + ".join(f"{count} x {name}" for name, count in other["fleet"].items()),
                    other["price_per_hour"],
                    other["tokens_per_s"],
                    other["usd_per_million_tokens"],
                    other["hours"],
                )
                for other in answer["alternatives"]
            ),
        )
    print()
    table(
        ("OFFER", "EACH LOST", "KNOWN FROM"),
        ((rate["pool"], f"{rate['per_node_h']:.2g} times an hour", rate["source"]) for rate in answer["rates"]),
    )
    print()
    if answer["hours"] is not None:
        what = f"the {steps_left:,} steps that are left" if done else "the whole job"
        print(f"expected: {answer['hours']:.4g} hours for {what}, {answer['usd']:,.2f} USD")
    if "profile" in answer:
        print(calibrated_by(answer["profile"]))
    if answer["held"]:
        print(f"kept: {answer['kept']} of the {answer['held']} nodes that are rented already and still to be had")
    print(answer["reason"])
