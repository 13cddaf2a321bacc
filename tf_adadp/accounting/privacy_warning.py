"""Warns of figures that are right and easily misread."""


class PrivacyWarning(UserWarning):
    """Says that a figure is correct as stated, but the way it was reached deserves attention.

    Example:
        >>> issubclass(dp.PrivacyWarning, UserWarning)
        True
    """
