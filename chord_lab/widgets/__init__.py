"""Panels for notebooks: each follows a shared `Selection`, and every number comes from `analysis`."""

from chord_lab.widgets.export_panel import ExportPanel
from chord_lab.widgets.folders import out_folder
from chord_lab.widgets.layout_explorer import LayoutExplorer
from chord_lab.widgets.load_explorer import LoadExplorer
from chord_lab.widgets.measurements import Measurements
from chord_lab.widgets.schedule_explorer import ScheduleExplorer
from chord_lab.widgets.selection import Selection
from chord_lab.widgets.sweep_panel import SweepPanel
from chord_lab.widgets.threshold_explorer import ThresholdExplorer
from chord_lab.widgets.timeline_explorer import TimelineExplorer
from chord_lab.widgets.winners_table import winners_frame

__all__ = [
    "ExportPanel",
    "LayoutExplorer",
    "LoadExplorer",
    "Measurements",
    "ScheduleExplorer",
    "Selection",
    "SweepPanel",
    "ThresholdExplorer",
    "TimelineExplorer",
    "out_folder",
    "winners_frame",
]
