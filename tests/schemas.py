"""What the tables of a database are, and what programs that were made for older ones would miss in newer ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import Connection, inspect


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """`columns`: type, and whether it may be left out (it may be null, or has a default). `rules`: what rows have to
    obey: keys, uniqueness, references, checks."""

    columns: Mapping[str, tuple[str, bool]]
    rules: frozenset[str]


Schema = Mapping[str, Table]


def schema_of(connection: Connection) -> Schema:
    looked = inspect(connection)
    found = {}
    for name in looked.get_table_names():
        if name == "alembic_version":
            continue
        columns = {
            each["name"]: (str(each["type"]), bool(each["nullable"] or each["default"] or each.get("identity")))
            for each in looked.get_columns(name)
        }
        rules = {f"key {looked.get_pk_constraint(name)['constrained_columns']}"}
        rules |= {f"unique {each['column_names']}" for each in looked.get_indexes(name) if each["unique"]}
        rules |= {f"unique {each['column_names']}" for each in looked.get_unique_constraints(name)}
        rules |= {f"check {each['sqltext']}" for each in looked.get_check_constraints(name)}
        rules |= {
            f"{each['constrained_columns']} in {each['referred_table']}" for each in looked.get_foreign_keys(name)
        }
        found[name] = Table(columns=columns, rules=frozenset(rules))
    return found


def narrowed(old: Schema, new: Schema) -> list[str]:
    """Empty if whoever reads and writes the old tables can go on with the new ones."""
    found = [f"the table {name} is gone" for name in sorted(old.keys() - new.keys())]
    for name in sorted(old.keys() & new.keys()):
        was, now = old[name], new[name]
        found += [f"{name}.{column} is gone" for column in sorted(was.columns.keys() - now.columns.keys())]
        added = now.columns.keys() - was.columns.keys()
        found += [f"{name}.{each} is new, and has to be given" for each in sorted(added) if not now.columns[each][1]]
        for column in sorted(was.columns.keys() & now.columns.keys()):
            (old_type, was_optional), (new_type, is_optional) = was.columns[column], now.columns[column]
            if old_type != new_type:
                found.append(f"{name}.{column} was {old_type}, and is {new_type}")
            if was_optional and not is_optional:
                found.append(f"{name}.{column} has to be given now")
        found += [f"{name} has a new rule: {rule}" for rule in sorted(now.rules - was.rules)]
    return found
