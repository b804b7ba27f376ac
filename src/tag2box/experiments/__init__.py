"""Studies: systems compared, tables and figures of the OD-WSCL paper. They return tables; ``reporting`` draws them."""

from tag2box.experiments.experiment import Experiment
from tag2box.experiments.paper_appendix import APPENDIX_A, APPENDIX_B, APPENDIX_C
from tag2box.experiments.paper_figures import FIG1C, FIG4, FIG5, FIG6, FIG7
from tag2box.experiments.paper_tables import TABLE1, TABLE2, TABLE3A, TABLE3B, TABLE3C

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        TABLE1, TABLE2, TABLE3A, TABLE3B, TABLE3C, FIG1C, FIG4, FIG5, FIG6, FIG7, APPENDIX_A, APPENDIX_B, APPENDIX_C,
    )
}  # fmt: skip
"""Experiments by the names of ``tag2box reproduce``."""
