"""Defines the warning for figures that are correct but easily misread."""


class PrivacyWarning(UserWarning):
    """Warns of a figure that is correct as stated, but easily misread.

    Example:
        >>> issubclass(dp.PrivacyWarning, UserWarning)
        True
    """
