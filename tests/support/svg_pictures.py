"""What is in an SVG picture of a schedule, for tests."""

import re
from xml.etree import ElementTree

__all__ = ["SVG", "number_in", "shapes", "step_boxes", "words"]

SVG = "{http://www.w3.org/2000/svg}"


def shapes(path):
    """What an SVG picture has: boxes `(colour, left, right, top, bottom)`, and texts `(words, x, y)`."""
    root = ElementTree.parse(path).getroot()
    boxes = []
    for element in root.iter(f"{SVG}path"):
        numbers = re.findall(r"[ML] (\S+) (\S+)", element.get("d"))
        style = re.search(r"fill: (#\w{6}|url)", element.get("style", ""))
        if len(numbers) == 4 and style:
            xs, ys = ([round(float(pair[axis]), 1) for pair in numbers] for axis in (0, 1))
            boxes.append((style[1], min(xs), max(xs), min(ys), max(ys)))
    texts = [("".join(e.itertext()), float(e.get("x")), float(e.get("y"))) for e in root.iter(f"{SVG}text")]
    return boxes, texts


def words(path):
    """The texts of a picture, in order."""
    return [text for text, _, _ in shapes(path)[1]]


def step_boxes(path):
    """The boxes of a picture's steps, without the page, the rows, and the legend's; and a row's left and right end."""
    boxes, _ = shapes(path)
    rows = [box for box in boxes if box[0] == "url"]
    _, left, right, _, _ = rows[0]
    bottom = max(box[4] for box in rows if box[1] == left and box[2] == right)
    return [box for box in boxes if box[0] not in ("url", "#ffffff") and box[4] <= bottom], left, right


def number_in(box, texts):
    """The one number in the middle of a box."""
    _, left, right, top, bottom = box
    (text,) = [text for text, x, y in texts if abs(x - (left + right) / 2) < 0.2 and top < y < bottom]
    return int(text)
