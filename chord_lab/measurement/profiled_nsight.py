"""`nsight-python` in the profiled process: counters by its Nsight Compute, or times by its CUPTI tool.

Imported before CUDA starts: the package attaches to the process when it is imported.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

TIME = "gpu__time_duration.sum"


class NsightTool:
    """Runs one launch under nsight-python and gives its figures as rows."""

    def __init__(self, tool: str, metrics: Sequence[str]) -> None:
        if tool == "cupti":
            os.environ["NSPY_NCU_INIT_AT_IMPORT"] = "0"  # the two tools exclude each other
        import nsight

        self.nsight = nsight
        self.tool = tool
        self.metrics = [TIME] if tool == "cupti" else list(dict.fromkeys([TIME, *metrics]))
        if tool == "cupti":
            try:
                nsight.activate(nsight.Tool.CUPTI)
            except Exception as error:
                raise self._refused(error) from error

    def _refused(self, error: Exception) -> RuntimeError:
        """CUPTI gives a bare code where it does not suit the driver: name who says it and what else there is."""
        return RuntimeError(f"{self.tool} of nsight-python gave up ({error}): use --collector ncu or events")

    def profile(self, key: str, launch: Callable[[], Any]) -> list[dict[str, Any]]:
        """``[{"kernel", "metric", "value", "unit", "device"}]`` of the kernels of one launch."""
        nsight = self.nsight

        @nsight.analyze.kernel(
            configs=[(key,)],
            runs=1,
            metrics=self.metrics,
            clock_control="none",
            cache_control="all",
            thermal_mode="off",  # a shared machine's fans and waits are not ours to steer
            verbosity=nsight.VerbosityLevel.SILENT,
        )
        def marked(record: str) -> None:
            with nsight.annotate(record):
                launch()

        try:
            frame = marked().to_dataframe()
        except Exception as error:
            raise self._refused(error) from error
        columns = ("Kernel", "Metric", "AvgValue", "Unit", "GPU")
        return [
            {"kernel": str(kernel), "metric": str(metric), "value": float(value), "unit": str(unit), "device": str(gpu)}
            for kernel, metric, value, unit, gpu in zip(*(frame[c] for c in columns), strict=True)
        ]
