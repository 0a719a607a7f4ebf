"""What `--explain` prints for people: the explanation of a plan as tables and sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shoal.cli_show import table

_TERMS = ("compute_s", "bubble_s", "tensor_s", "pipeline_s", "gradient_s", "optimizer_s")
_LISTED = 4
_DRAWN = 30  # characters of a bar


def show_explanation(found: Mapping[str, Any], goodput: Mapping[str, Any] | None) -> None:
    """Takes the published forms; `goodput` is None where nobody knows how often nodes are lost."""
    _show_terms(found)
    if goodput is not None:
        _show_goodput(goodput)
    _show_candidates(found["candidates"])
    print("\nWHAT BINDS")
    for sentence in found["binding"]["sentences"]:
        print(f"  {_capital(sentence)}.")
    _show_exchanges(found["exchanges"])
    if found["left_out"]:
        print("\nLEFT OUT")
        for entry in found["left_out"]:
            print(f"  {_left_out(entry)}")
    _show_marginals(found)


def _show_terms(found: Mapping[str, Any]) -> None:
    print("\nWHERE THE STEP GOES")
    rows = (
        (f"  {term['meaning']}", _seconds(term["seconds"]), f"{term['share']:.1%}", _bar(term["share"]))
        for term in found["terms"]
    )
    table(("", "", "", ""), rows, header=False)


def _show_goodput(goodput: Mapping[str, Any]) -> None:
    print("\nWITH PREEMPTIONS")
    table(
        (
            "COPIES",
            "",
            "SENT PER PARAMETER",
            "STEP",
            "REDONE STEPS",
            "RECOVERY",
            "ALL COPIES LOST",
            "TOKENS/S",
            "OF PREDICTED",
        ),
        (
            (
                option["copies"],
                "planned" if option["copies"] == goodput["copies"] else "",
                f"{option['network_bytes_per_parameter']:.3g} bytes",
                _seconds(option["step_s"]),
                option["redone_steps"],
                _seconds(option["recovery_s"]),
                f"{option['rollbacks_per_h']:.2g} an hour",
                option["tokens_per_s"],
                f"{option['share']:.1%}",
            )
            for option in goodput["options"]
        ),
    )
    table(
        ("POOL", "NODES", "EACH LOST", "KNOWN FROM"),
        (
            (rate["pool"], rate["num_nodes"], f"{rate['per_node_h']:.2g} times an hour", rate["source"])
            for rate in goodput["rates"]
        ),
    )


def _bar(share: float) -> str:
    return "#" * round(_DRAWN * share) or " "


def _show_candidates(candidates: list[Mapping[str, Any]]) -> None:
    if len(candidates) < 2:
        return
    print("\nCANDIDATES COMPARED")
    table(
        ("STEP", "BEHIND", *(name.removesuffix("_s").upper() for name in _TERMS), "TOKENS/S", "$/M TOKENS", "PLAN"),
        (
            (
                _seconds(entry["step_s"]),
                "chosen" if entry["chosen"] else f"{entry['behind']:+.1%}",
                *(_seconds(entry["terms"][name]) for name in _TERMS),
                entry["tokens_per_s"],
                _price(entry["price_per_million_tokens"]),
                entry["plan"],
            )
            for entry in candidates
        ),
    )


def _show_exchanges(exchanges: Sequence[Mapping[str, Any]]) -> None:
    if not exchanges:
        return
    print("\nEXCHANGES, EACH BY ITSELF")
    for entry in exchanges:
        among = f"{entry['num_replicas']} replicas on {entry['num_nodes']} node{'s' if entry['num_nodes'] > 1 else ''}"
        others = (f"{other['collective']} {_seconds(other['seconds'])}" for other in entry["others"])
        print(f"  {_capital(entry['holds'])} among {among}: {entry['collective']} takes {_seconds(entry['seconds'])}")
        print(f"    others would take: {'; '.join(others)}")


def _left_out(entry: Mapping[str, Any]) -> str:
    names = entry["devices"]
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"{len(names)} x {entry['device_type']} ({', '.join(names[:_LISTED])}{more}): {entry['reason']}."


def _show_marginals(found: Mapping[str, Any]) -> None:
    if found["marginals"]:
        print("\nWHAT MORE WOULD BRING")
        table(
            ("ONE MORE", "LIKE", "TOKENS/S", "GAIN", "$/M TOKENS", "PLAN"),
            (
                (
                    _added(entry),
                    entry["like"],
                    entry["tokens_per_s"],
                    f"{entry['gain']:+.1%}",
                    _price(entry["price_per_million_tokens"]),
                    entry["plan"] if entry["used"] else "no better plan was found with it",
                )
                for entry in found["marginals"]
            ),
        )
    if found["skipped"]:
        print(_capital(found["skipped"]) + ".")


def _added(entry: Mapping[str, Any]) -> str:
    if entry["adds"] == "device":
        return str(entry["device_type"])
    return f"node of {entry['num_devices']} {entry['device_type']}"


def _capital(text: str) -> str:
    """For the start of a sentence; a name stays as it is written."""
    first = text.split(" ", 1)[0]
    return text if any(character in first for character in ":0123456789") else text[:1].upper() + text[1:]


def _seconds(value: float) -> str:
    return "0 s" if value < 1e-9 else f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def _price(value: float) -> str:
    return f"{value:.3g}" if value else "-"
