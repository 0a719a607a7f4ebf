"""Audit events are append-only: the database refuses to change or to remove one"""

from __future__ import annotations

from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None

_REFUSED = "audit events are append-only"

_SQLITE = (
    f"""CREATE TRIGGER audit_events_are_not_changed BEFORE UPDATE ON audit_events
    BEGIN SELECT RAISE(ABORT, '{_REFUSED}'); END""",
    f"""CREATE TRIGGER audit_events_are_kept BEFORE DELETE ON audit_events
    BEGIN SELECT RAISE(ABORT, '{_REFUSED}'); END""",
    # Where a row of the same key is replaced, SQLite removes the old one and asks no other trigger.
    f"""CREATE TRIGGER audit_events_are_not_replaced BEFORE INSERT ON audit_events
    WHEN EXISTS (SELECT 1 FROM audit_events WHERE id = NEW.id)
    BEGIN SELECT RAISE(ABORT, '{_REFUSED}'); END""",
)
_POSTGRES = (
    f"""CREATE FUNCTION refuse_audit_change() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN RAISE EXCEPTION '{_REFUSED}' USING ERRCODE = 'restrict_violation'; END $$""",
    """CREATE TRIGGER audit_events_are_kept BEFORE UPDATE OR DELETE ON audit_events
    FOR EACH ROW EXECUTE FUNCTION refuse_audit_change()""",
    """CREATE TRIGGER audit_events_are_not_emptied BEFORE TRUNCATE ON audit_events
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_audit_change()""",
)


def upgrade() -> None:
    for statement in _POSTGRES if op.get_bind().dialect.name == "postgresql" else _SQLITE:
        op.execute(statement)
