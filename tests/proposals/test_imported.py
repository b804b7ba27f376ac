from __future__ import annotations

import numpy as np
import pytest

from tag2box import settings
from tag2box.errors import UserError
from tag2box.proposals.importers.proposal_files import Imported
from tag2box.recipes import Config


@pytest.mark.parametrize("method", ["mcg", "cob"])
def test_it_cannot_search_and_the_error_names_a_remedy(method: str) -> None:
    proposals = Imported(method=method)  # type: ignore[arg-type]
    with pytest.raises(UserError) as ready:
        proposals.ready()
    with pytest.raises(UserError) as searched:
        proposals.search(np.zeros((4, 4, 3), np.uint8), 1.0)
    assert str(ready.value) == str(searched.value)
    assert f"{method.upper()} boxes" in str(ready.value) and "\n" not in str(ready.value)
    assert "proposals import FOLDER DATA --format mcg --out STORE" in str(ready.value)


def test_how_a_search_would_run_is_no_setting_of_it() -> None:
    assert {s.key for s in settings.describe(Config) if s.kind == "imported"} == {"proposals.kind", "proposals.method"}
    with pytest.raises(UserError, match=r"proposals\.max_boxes is a setting of kind .*imported"):
        settings.load(Config, [], ["proposals.kind=imported", "proposals.max_boxes=5"])


@pytest.mark.parametrize("override", ["proposals.kind=imported", "proposals.method=cob"])
def test_it_is_chosen_by_settings(override: str) -> None:
    config = settings.load(Config, [], ["proposals.kind=imported", override])
    assert config.proposals == Imported(method="cob" if "cob" in override else "mcg")


def test_no_store_is_taken_for_one_that_it_made() -> None:
    assert Imported(method="cob").source() == {"kind": "imported", "method": "cob"}
