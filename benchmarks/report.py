"""What a benchmark found: a line per measurement, and all of them with command and hardware."""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

PEAK_TFLOPS = 790  # bf16 matmuls of random data, measured on one H200
DECLINED = (NotImplementedError, ValueError, RuntimeError)  # this measurement is recorded as failed


class Report:
    """Lines printed as they come, and all of them as JSON at the end."""

    def __init__(self, path: Path | None):
        device = jax.devices()[0]
        self.path = path
        self.rows = []
        self.header = {
            "command": " ".join(
                [f"python benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]
            ).split(" --out")[0],
            "hardware": f"{jax.device_count()} {device.device_kind}",
            "jax": jax.__version__,
        }

    def add(self, **row):
        self.rows.append(row)
        cells = (f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items())
        print("  ".join(cells), flush=True)
        if self.path:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(self.header | {"rows": self.rows}, indent=1) + "\n")

    def errors(self, names, found, exact, plain=None, **row):
        """Add how far `found` is from `exact` for each name, and where given the plain maths."""
        for place, name in enumerate(names):
            numbers = {"error": _largest(found[place], exact[place])}
            if plain is not None:
                numbers["plain_error"] = _largest(plain[place], exact[place])
            numbers["relative"] = _relative(found[place], exact[place])
            if plain is not None:
                numbers["plain_relative"] = _relative(plain[place], exact[place])
            self.add(**row, what=name, **numbers)

    def made(self, build, **row):
        """What `build()` returns; None, and a row with the reason, where it declines."""
        try:
            return build()
        except DECLINED as reason:
            self._failed(reason, **row)
            return None

    def _failed(self, reason: Exception, **row):
        self.add(**row, failed=" ".join(str(reason).split())[:200])

    def timed(self, work: float, measure, unit: str = "tflops", **row):
        """Add what `measure()` finds, or why it could not; `work` in operations or in bytes."""
        try:
            found = measure()
        except DECLINED as reason:
            self._failed(reason, **row)
            return
        rate = work / found["ms"] / 1e9
        known = unit == "tflops" and "H200" in self.header["hardware"]
        share = {"share": rate / PEAK_TFLOPS} if known else {}
        self.add(**row, **found, **{unit: rate}, **share)


def _largest(found, exact) -> float:
    return float(jnp.abs(found - exact).max())


def _relative(found, exact) -> float:
    return float(jnp.linalg.norm(found - exact) / jnp.linalg.norm(exact))
