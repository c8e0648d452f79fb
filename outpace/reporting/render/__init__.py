"""Documents as HTML, Markdown and screenshots."""
