"""Weakly supervised detection methods: labelers, MIL strategies and loss terms, one file a paper."""

from __future__ import annotations

from tag2box.methods.c_midn import CMidn, CMidnLabeler
from tag2box.methods.c_mil import CMil, CMilLabeler
from tag2box.methods.c_wsl import CWsl
from tag2box.methods.discovery import Discovery
from tag2box.methods.mist import Mist
from tag2box.methods.oicr import Oicr
from tag2box.methods.oim import Oim
from tag2box.methods.pcl import Pcl
from tag2box.methods.slv import Slv
from tag2box.methods.wsddn import Wsddn
from tag2box.methods.wsod2 import Wsod2

BuiltInLabeler = Oicr | Discovery | CMilLabeler | CMidnLabeler | Pcl | Mist | CWsl | Oim | Slv | Wsod2
"""The labelers that settings know, told apart by their ``kind``."""

BuiltInMil = Wsddn | CMil | CMidn
"""The MIL strategies that settings know, told apart by their ``kind``."""
