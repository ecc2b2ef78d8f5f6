"""A model that cannot be had is one sentence, whatever it is that is missing."""

import pytest

from tandem_engine.collective import Sizes
from tandem_engine.loading import load_aside
from tandem_engine.model import SetupError


class TestNoMemory:
    @pytest.mark.parametrize("cells", [10**14, 10**20])
    async def test_more_cells_than_the_machine_has_is_a_sentence(self, cells):
        """The flags that ask for less are named; a traceback helps nobody."""
        with pytest.raises(SetupError, match="give less --max-total-tokens"):
            await load_aside("toy", Sizes(1024, 8, cells))
