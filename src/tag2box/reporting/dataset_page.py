"""The page about a dataset: its photos and tags, and the objects that one pseudo box per tag would miss."""

from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from tag2box.annotations import TaggedPhotos
from tag2box.data.stats import DataStats, ObjectStats, TagStats
from tag2box.reporting import dataset_figures, formatting as fmt, gallery
from tag2box.reporting.sections import Section, SectionPage, TileRow, write_page

SHEET_THUMBNAIL = 200  # longest side of a photo of the contact sheet
SHEET_PHOTOS, SHEET_CLASSES = 160, 80  # limits that keep the page small
FEWEST, MOST = 2, 8  # photos per class
SHOWN_FAULTS = 3  # faults quoted in full


@dataclass(frozen=True, slots=True)
class DataInputs:
    """Everything the page shows."""

    title: str
    tagged: TaggedPhotos
    stats: DataStats
    left_out: tuple[str, ...] = ()  # lines about photos, rows or objects that could not be read


def write_data_page(inputs: DataInputs, out: Path) -> None:
    """Write the page of a dataset as one self-contained HTML file."""
    write_page(build_data_page(inputs), out)


def build_data_page(inputs: DataInputs) -> SectionPage:
    """Turn counts into everything the template shows."""
    tags, objects = inputs.stats.tags, inputs.stats.objects
    album = gallery.Album(SHEET_THUMBNAIL)
    has_objects = objects is not None and any(objects.objects)
    sections = [
        *(_object_sections(objects) if objects is not None and has_objects else ()),
        _tag_section(tags),
        *([_together_section(tags)] if sum(n > 0 for n in tags.per_class) > 1 else []),
        _photo_section(inputs),
        *_sheet_section(inputs.tagged, tags, album),
        _table_section(inputs.stats),
    ]
    return SectionPage(
        kicker="tag2box data",
        title=inputs.title,
        lede=_lede(inputs.stats),
        facts=_facts(inputs.stats),
        sections=tuple(sections),
        style=Markup(album.style),
        unreadable=album.unreadable,
    )


def _lede(stats: DataStats) -> str:
    tags, objects = stats.tags, stats.objects
    names = f" ({fmt.listed(tags.classes, 8)})" if tags.classes else ""
    words = f"{fmt.plural(tags.photos, 'photo')} tagged with {fmt.plural(len(tags.classes), 'class')}{names}."
    if objects is None:
        return f"{words} There are tags, but no boxes: objects are not counted here."
    if not any(objects.objects):
        return f"{words} The dataset can hold boxes, but has no object of these classes."
    total, missed = sum(objects.objects), sum(objects.missed)
    return (
        f"{words} Their {fmt.plural(total, 'object')} make {fmt.plural(sum(objects.pairs), 'image-class pair')}: a "
        f"method that takes one box per tag must miss {fmt.whole(missed)} of them."
    )


def _facts(stats: DataStats) -> tuple[fmt.Fact, ...]:
    tags, objects = stats.tags, stats.objects
    mean = sum(tags.per_class) / tags.photos if tags.photos else 0.0
    facts = [
        fmt.Fact("Photos", fmt.whole(tags.photos), "", f"{fmt.whole(len(tags.untagged))} without tags"),
        fmt.Fact("Classes", fmt.whole(len(tags.classes)), "", f"{fmt.whole(len(tags.unused))} without photos"),
        fmt.Fact("Tags per photo", f"{mean:.2f}", "", f"{fmt.whole(sum(tags.per_class))} tags in all"),
    ]
    if objects is not None:
        marked = (
            f"{fmt.whole(sum(objects.difficult))} difficult and {fmt.plural(sum(objects.crowds), 'crowd')} not counted"
        )
        facts.append(fmt.Fact("Objects", fmt.whole(sum(objects.objects)), "", marked))
        if any(objects.objects):
            facts.append(
                fmt.Fact("Missed", fmt.percent(objects.missed_share), "%", "of the objects, with one box per tag")
            )
    return tuple(facts)


def _object_sections(stats: ObjectStats) -> tuple[Section, ...]:
    return (
        Section(
            "missed",
            "What one box per tag must miss",
            "A tag states that a class is present, not how often. Labelling only the top box of each image-class pair "
            "(argmax) makes the other objects background. Difficult objects and crowds are not counted.",
            wide=True,
            figures=(dataset_figures.missed_figure(stats),),
        ),
        Section(
            "numbers",
            "Objects per photo",
            "Classes with many objects per photo gain most from a method that discovers further objects.",
            wide=True,
            figures=(dataset_figures.objects_per_photo_figure(stats),),
        ),
        Section(
            "boxes",
            "Size and neighbours",
            "Small objects have few proposals that fit; neighbours of one class are easily grouped into one box.",
            wide=len(stats.classes) > dataset_figures.LONG,
            figures=(dataset_figures.object_size_figure(stats), dataset_figures.neighbour_figure(stats)),
        ),
    )


def _tag_section(tags: TagStats) -> Section:
    return Section(
        "tags",
        "Tags",
        "The only labels of training: which classes each photo shows.",
        wide=len(tags.classes) > dataset_figures.LONG,
        figures=(dataset_figures.balance_figure(tags), dataset_figures.tags_per_photo_figure(tags)),
        warnings=dataset_figures.tag_warnings(tags),
    )


def _together_section(tags: TagStats) -> Section:
    return Section(
        "together",
        "Classes that occur together",
        "Photos that show one class and not the other separate two classes. Classes that always occur together are, "
        "to a method that learns from tags, one class.",
        wide=True,
        figures=(dataset_figures.together_figure(tags),),
    )


def _photo_section(inputs: DataInputs) -> Section:
    stats, faults = inputs.stats, inputs.left_out
    quoted = "; ".join(faults[:SHOWN_FAULTS])
    words = f"Left out, {fmt.plural(len(faults), 'fault')} (`tag2box data check` lists them all): {quoted}"
    return Section(
        "photos",
        "Photos",
        "Width and height after EXIF rotation.",
        figures=(dataset_figures.photo_size_figure(stats.sizes), dataset_figures.shape_figure(stats.sizes)),
        warnings=(words,) if faults else (),
    )


def _sheet_section(tagged: TaggedPhotos, tags: TagStats, album: gallery.Album) -> list[Section]:
    """A contact sheet: a few photos per class, evenly spaced through the list."""
    order = dataset_figures.by_number(tags.per_class)[:SHEET_CLASSES]
    if not order:
        return []
    count = min(max(SHEET_PHOTOS // len(order), FEWEST), MOST)
    shelves = []
    for c in sorted(order):
        rows = gallery.evenly_spaced(tagged.tags[:, c].nonzero().flatten().tolist(), count)
        photos = [tagged.photos[i] for i in rows]
        shots = [(photo, album.add(photo.path)) for photo in photos]
        tiles = tuple(
            gallery.Tile(shot, (), "", f"Photo {photo.id}, tagged {tags.classes[c]}") for photo, shot in shots if shot
        )
        shelves.append(TileRow(tags.classes[c], fmt.plural(tags.per_class[c], "photo"), tiles))
    left = len(dataset_figures.by_number(tags.per_class)) - len(order)
    words = f"Up to {fmt.plural(count, 'photo')} per class, evenly spaced through the list: not picked by hand."
    words += f" The {left} rarest classes are not shown." if left else ""
    return [Section("sheet", "Photos of each class", words, shelves=tuple(shelves))]


def _table_section(stats: DataStats) -> Section:
    tags, objects = stats.tags, stats.objects
    heads = ["photos", "alone", "unsure"]
    columns = [tags.per_class, tags.alone, tags.unsure]
    if objects is not None:
        heads += ["objects", "missed", "difficult", "crowds"]
        columns += [objects.objects, objects.missed, objects.difficult, objects.crowds]
    rows = [
        fmt.TableRow(name, tuple(fmt.whole(column[c]) for column in columns)) for c, name in enumerate(tags.classes)
    ]
    total = fmt.TableRow("all", tuple(fmt.whole(sum(column)) for column in columns))
    table = fmt.Table("Counts by class", tuple(heads), (*rows, total))
    return Section("counts", "All numbers", "Classes in the order of the dataset.", tables=(table,))
