"""Detection of files that are not what their names say, by their first bytes."""


def misplaced_content(head: bytes) -> str | None:
    """Describe what a file with these first bytes is, and what to do; None if nothing is wrong.

    It detects web pages, empty files, and text in an encoding other than UTF-8.
    """
    if not head:
        return "it is empty. Fetch it again"
    if head.lstrip()[:1] == b"<":
        return (
            "it holds a web page (HTML), probably saved from the page that links to the file, or "
            "from a download that needs a login. Fetch the file itself"
        )
    if head.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\x00" in head[:4]:
        return "it is in UTF-16. Save it as UTF-8"
    if head.startswith(b"\xef\xbb\xbf"):
        return (
            "it begins with a byte-order mark, which transformers does not read. Save it as UTF-8 "
            "without one"
        )
    return None
