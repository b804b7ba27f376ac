"""The tables and figures of the paper, each as an experiment. One file each; this dictionary is all there is."""

from __future__ import annotations

from tag2box.studies.experiment import Experiment
from tag2box.studies.experiments.appendix_a import APPENDIX_A
from tag2box.studies.experiments.appendix_b import APPENDIX_B
from tag2box.studies.experiments.appendix_c import APPENDIX_C
from tag2box.studies.experiments.counts import FIG1C, FIG7
from tag2box.studies.experiments.fig4 import FIG4
from tag2box.studies.experiments.fig5 import FIG5
from tag2box.studies.experiments.fig6 import FIG6
from tag2box.studies.experiments.table1 import TABLE1
from tag2box.studies.experiments.table2 import TABLE2
from tag2box.studies.experiments.table3a import TABLE3A
from tag2box.studies.experiments.table3b import TABLE3B
from tag2box.studies.experiments.table3c import TABLE3C

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        TABLE1, TABLE2, TABLE3A, TABLE3B, TABLE3C, FIG1C, FIG4, FIG5, FIG6, FIG7, APPENDIX_A, APPENDIX_B, APPENDIX_C,
    )
}  # fmt: skip
"""By the names ``tag2box reproduce`` knows."""
