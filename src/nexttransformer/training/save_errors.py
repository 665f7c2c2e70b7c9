"""How a save can end badly: a clean failure, or a reason to end the run."""

from nexttransformer.errors import RunFailure


class SaveFailed(RunFailure):
    """This save failed and left nothing behind; older checkpoints are untouched. Training may go on.

    Raised on every rank with the same text. `reason` is an id for the `save_failed` event: `space`, `write`,
    `exists`, `folder_not_seen`.
    """

    def __init__(self, message: str, reason: str = "", file: str | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.file = file


class SaveRefused(RunFailure):
    """Saving would be wrong: the run must end. Same text on all ranks.

    `reason`: `nonfinite_weights`, `ranks_differ`, `lock_lost`.
    """

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason
