"""Whether this version works on tables that a newer one has made: while replicas are replaced one by one, and after a
rollback, it has to. Owns the one row in which the newer one has said so."""

from __future__ import annotations

from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, String, inspect, select
from sqlalchemy.orm import Mapped, mapped_column

from shoal_service.models import Base


class SchemaFloorRow(Base):
    """One row: the oldest revision whose programs work on these tables. Migrations that take something away from older
    programs raise it (CONTRIBUTING.md); those that only add leave it."""

    __tablename__ = "schema_floor"

    revision: Mapped[str] = mapped_column(String(32), primary_key=True)


def is_ahead(connection: Connection, config: Config) -> bool:
    """Whether the tables are of a newer version, and this one works on them as they are. Raises ValueError where it
    does not."""
    scripts = ScriptDirectory.from_config(config)
    there = MigrationContext.configure(connection).get_current_revision()
    if there is None or there in {script.revision for script in scripts.walk_revisions()}:
        return False
    mine = scripts.get_current_head() or ""
    is_told = inspect(connection).has_table(SchemaFloorRow.__tablename__)
    floor = connection.scalar(select(SchemaFloorRow.revision)) if is_told else None
    if floor is None or floor > mine:
        raise ValueError(
            f"database_url: the database has the tables of a newer version ({there}), on which this one ({mine}) "
            "cannot work: start the newer one, or restore the backup of before the upgrade"
        )
    return True
