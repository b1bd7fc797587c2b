"""What other engines have served to a tenant: a front sends it to an engine with each request.

An engine reports what it has served since its process started, which only grows. A *life* is one run of that process,
known by its incarnation number. A front keeps the greatest number for each engine, life and tenant, so a message that
comes twice, late or never changes nothing once a later one is there. The engine in turn keeps the greatest sum that any
front has sent it (`Tenant.elsewhere`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from text_generation_router.scheduling.request import Share

IDLE_S = 60.0  # seconds after which a tenant without new service is forgotten
MAX_LIVES = 8  # lives of one engine that are remembered one by one; older ones only as their sum


@dataclass(slots=True)
class ServiceOfTenant:
    served: dict[int, dict[int, float]] = field(default_factory=dict)  # by engine and life
    total: float = 0.0  # the sum of `served`, and of lives that are not remembered one by one
    grew_s: float = 0.0  # when `total` last grew


class ServiceBook:
    """The service of all engines, as one front knows it. Lives of an engine have rising numbers."""

    def __init__(self) -> None:
        self._tenants: dict[Share, ServiceOfTenant] = {}

    def __len__(self) -> int:
        return len(self._tenants)

    def take_report(self, engine: int, life: int, served: Mapping[Share, float], now_s: float) -> None:
        """Notes the tokens that an engine has served to each tenant in this life."""
        for share, tokens in served.items():
            tenant = self._tenants.get(share)
            if tenant is None:
                tenant = self._tenants[share] = ServiceOfTenant(grew_s=now_s)
            lives = tenant.served.setdefault(engine, {})
            if len(lives) == MAX_LIVES and life not in lives:
                if life < min(lives):
                    continue
                del lives[min(lives)]
            more = tokens - lives.get(life, 0.0)
            if more > 0:
                lives[life] = tokens
                tenant.total += more
                tenant.grew_s = now_s

    def elsewhere(self, engine: int, life: int, share: Share) -> float:
        """Tokens served to the tenant by all engines and lives but this one."""
        tenant = self._tenants.get(share)
        return 0.0 if tenant is None else tenant.total - tenant.served.get(engine, {}).get(life, 0.0)

    def forget_idle(self, now_s: float) -> None:
        """Forgets the tenants whose service has not grown for IDLE_S seconds."""
        self._tenants = {share: each for share, each in self._tenants.items() if now_s - each.grew_s < IDLE_S}
