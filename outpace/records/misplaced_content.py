"""Detection of files whose first bytes do not match their names."""

# First bytes of compressed files.
COMPRESSED = {b"\x1f\x8b": "gzip", b"PK\x03\x04": "zip", b"\x28\xb5\x2f\xfd": "zstd",
              b"\xfd7zXZ\x00": "xz", b"BZh": "bzip2"}  # fmt: skip


def misplaced_content(head: bytes) -> str | None:
    """Explain why a file is not plain UTF-8 text, and what to do; None if nothing is found.

    `head` is the beginning of the file. Detects web pages, empty and compressed files, and other
    encodings.
    """
    if not head:
        return "it is empty. Download it again"
    for begin, kind in COMPRESSED.items():
        if head.startswith(begin):
            return f"it is compressed ({kind}). Decompress it"
    if head.lstrip().startswith(b"<?xml"):
        return (
            "it contains XML, probably an error message from the download server. Download the "
            "file itself"
        )
    if head.lstrip()[:1] == b"<":
        return (
            "it contains a web page (HTML), probably the page that links to the file, or a login "
            "page. Download the file itself"
        )
    if head.startswith((b"\xff\xfe\x00\x00", b"\x00\x00\xfe\xff")):
        return "it is in UTF-32. Save it as UTF-8"
    if head.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\x00" in head[:4]:
        return "it is in UTF-16. Save it as UTF-8"
    if head.startswith(b"\xef\xbb\xbf"):
        return (
            "it begins with a byte-order mark, which transformers does not read. Save it as UTF-8 "
            "without one"
        )
    return None
