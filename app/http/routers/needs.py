"""The callers that routes ask for."""

from __future__ import annotations

from typing import Annotated

from app.auth.principal import Principal
from app.auth.requires import Requires
from app.domain.scopes import Scope

MayRead = Annotated[Principal, Requires(Scope.READ)]
MayManageEngines = Annotated[Principal, Requires(Scope.ENGINES)]
MayFlush = Annotated[Principal, Requires(Scope.CACHE)]
MayPause = Annotated[Principal, Requires(Scope.PAUSE)]
MayManageResources = Annotated[Principal, Requires(Scope.RESOURCES)]
MayUpdateWeights = Annotated[Principal, Requires(Scope.WEIGHTS)]
MayManageAdapters = Annotated[Principal, Requires(Scope.ADAPTERS)]
MayReconfigure = Annotated[Principal, Requires(Scope.RECONFIGURE)]
MayProfile = Annotated[Principal, Requires(Scope.PROFILE)]
MayAbort = Annotated[Principal, Requires(Scope.ABORT)]
MayShutDown = Annotated[Principal, Requires(Scope.SHUTDOWN)]
MayCancel = Annotated[Principal, Requires(Scope.CANCEL)]
MaySettle = Annotated[Principal, Requires(Scope.SETTLE, person=True)]
MayAudit = Annotated[Principal, Requires(Scope.AUDIT)]
MayAdminister = Annotated[Principal, Requires()]
"""Any admin scope will do."""
