"""Journals are append-only; levels of long curves; duties of one replica; what retention took; indexes of lists"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

_REFUSED = "the journal is append-only"

_SQLITE = (
    f"""CREATE TRIGGER journal_is_not_changed BEFORE UPDATE ON journal
    BEGIN SELECT RAISE(ABORT, '{_REFUSED}'); END""",
    f"""CREATE TRIGGER journal_is_kept BEFORE DELETE ON journal
    WHEN OLD.seq > COALESCE((SELECT forgotten_seq FROM jobs WHERE id = OLD.job_id), 0)
    BEGIN SELECT RAISE(ABORT, '{_REFUSED}'); END""",
)
_POSTGRES = (
    f"""CREATE FUNCTION refuse_journal_change() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN RAISE EXCEPTION '{_REFUSED}' USING ERRCODE = 'restrict_violation'; END $$""",
    f"""CREATE FUNCTION refuse_journal_deletion() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    IF OLD.seq > COALESCE((SELECT forgotten_seq FROM jobs WHERE id = OLD.job_id), 0) THEN
        RAISE EXCEPTION '{_REFUSED}' USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN OLD; END $$""",
    """CREATE TRIGGER journal_is_not_changed BEFORE UPDATE ON journal
    FOR EACH ROW EXECUTE FUNCTION refuse_journal_change()""",
    """CREATE TRIGGER journal_is_not_emptied BEFORE TRUNCATE ON journal
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_journal_change()""",
    """CREATE TRIGGER journal_is_kept BEFORE DELETE ON journal
    FOR EACH ROW EXECUTE FUNCTION refuse_journal_deletion()""",
)


def upgrade() -> None:
    with op.batch_alter_table("jobs") as batch_op:
        batch_op.add_column(sa.Column("forgotten_seq", sa.Integer(), nullable=False, server_default="0"))
        batch_op.add_column(sa.Column("is_thinned", sa.Boolean(), nullable=False, server_default=sa.false()))
        batch_op.drop_index("ix_jobs_cluster_id")
        batch_op.drop_index("ix_jobs_state")
        batch_op.create_index("ix_jobs_state_id", ["state", "id"])
        batch_op.create_index("ix_jobs_cluster_state", ["cluster_id", "state"])
        batch_op.create_index("ix_jobs_state_since", ["state", "since_at_s"])
    op.create_table(
        "curve_buckets",
        sa.Column("job_id", sa.String(40), nullable=False),
        sa.Column("width", sa.Integer(), nullable=False, autoincrement=False),
        sa.Column("bucket", sa.Integer(), nullable=False, autoincrement=False),
        sa.Column("low_seq", sa.Integer(), nullable=False),
        sa.Column("low_loss", sa.Float(), nullable=True),
        sa.Column("high_seq", sa.Integer(), nullable=False),
        sa.Column("high_loss", sa.Float(), nullable=True),
        sa.Column("num_points", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"]),
        sa.PrimaryKeyConstraint("job_id", "width", "bucket"),
    )
    op.create_table(
        "duties",
        sa.Column("name", sa.String(120), nullable=False),
        sa.Column("holder", sa.String(200), nullable=True),
        sa.Column("lease_until_s", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("name"),
    )
    for statement in _POSTGRES if op.get_bind().dialect.name == "postgresql" else _SQLITE:
        op.execute(statement)
