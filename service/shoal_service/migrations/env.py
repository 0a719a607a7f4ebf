"""How alembic runs our migrations: on the connection that database.py hands over, never on one of its own."""

from __future__ import annotations

from alembic import context

from shoal_service import models_comparison as models_comparison  # tables of its own
from shoal_service import models_drills as models_drills
from shoal_service import models_people as models_people
from shoal_service import models_pools as models_pools
from shoal_service import models_watching as models_watching
from shoal_service import models_webhooks as models_webhooks
from shoal_service import schema_floor as schema_floor
from shoal_service.models import Base

connection = context.config.attributes.get("connection")
if connection is None:
    raise RuntimeError("run migrations through shoal_service.database.Database.migrate()")

context.configure(connection=connection, target_metadata=Base.metadata, render_as_batch=True, compare_type=True)
with context.begin_transaction():
    context.run_migrations()
