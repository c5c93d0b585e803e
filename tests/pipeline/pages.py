"""Pages of HTML as the tests read them."""

from html.parser import HTMLParser

HOSTILE = "<script>alert('x')</script>&\"\x00\u202e$x$"


class Page(HTMLParser):
    """Checks that tags are closed in their order, and collects the text and what would be loaded."""

    VOID = frozenset({"meta", "link", "br", "img", "input"})

    def __init__(self, page):
        super().__init__(convert_charrefs=True)
        self.open, self.text, self.loaded, self.tags = [], "", [], []
        self.feed(page)
        self.close()
        assert self.open == []

    def _note(self, tag, attributes):
        self.tags.append(tag)
        sources = ("src", "href", "xlink:href")
        self.loaded += [value for name, value in attributes if name in sources and value[0] != "#"]

    def handle_starttag(self, tag, attributes):
        self._note(tag, attributes)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self._note(tag, attributes)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, text):
        self.text += text
