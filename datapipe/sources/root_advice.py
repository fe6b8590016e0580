"""What to type instead where folders of class folders were refused. What is advised was tried."""

from __future__ import annotations

import glob
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import quote

from ..console import format_some
from ..errors import DatapipeError, SettingError, SourceError
from ..split_names import (
    NAMED,
    TEST,
    TRAIN,
    VAL,
    have_twins,
    is_split_name,
    matches,
    named_options,
    split_options,
    split_words,
    splits_of,
)
from ..split_variants import find_variants
from ..splits import AmbiguousSplitError
from . import open_source
from .class_folders import OF_IMAGES, advise_joined, are_parts, shared_classes
from .class_tree import LAYOUT, ClassTree, RootError
from .file_names import is_image, may_have_labels
from .listing import LeftOut, Listing, folders_in
from .named_images import lists_of_splits
from .roots import Root, class_folder, find_root, find_splits
from .table_advice import advise_lists, advise_sorting, advise_tables, without_log


def advise_roots(source: Path, listing: Listing, error: RootError | AmbiguousSplitError) -> str:
    """Return what to type, or what to do, about folders that were refused, for the end of a message.

    Args:
        source: Path that the user has given.
        listing: Listing with what the user says of the source.
        error: The refusal.
    """
    doubt = error.doubt if isinstance(error, RootError) else None
    if doubt and doubt.about == "lists":
        return _advise_lists(source, listing)
    root = Path(error.path) if error.path else source
    texts: list[str] = []
    if not root.is_dir():  # but an image beside the class folders
        root = root.parent
        texts += ["move images that lie so into their class folders, or elsewhere"] if class_folder(root) else []
    folders = folders_in(source)
    are_flat = doubt is None or doubt.about == "parts" or (doubt.about == "level" and not doubt.likely)
    if not listing.rule.patterns:
        is_above = doubt is not None and root == source
        inner = next((its for name in folders if (its := find_splits(source, name, listing))), "")
        if is_above and doubt and doubt.likely:
            texts.append(_advise_folder("the class folders are", root / doubt.likely, listing))
        elif any(map(split_words, folders)) or inner:
            texts, are_flat = _advise_splits(source, folders, listing, is_above)
            if inner:
                texts = [_advise_folder("the data set is", source / inner, listing), *texts[: 1 - are_flat]]
                are_flat = False
        elif is_above and doubt and doubt.about in ("groups", "level"):
            texts += _advise_groups(source, folders, listing)
            are_flat = not texts
        if isinstance(error, RootError) and error.as_it_is:
            if_so = "they are classes" if doubt and doubt.about == "parts" else "it is right as it is"
            texts.append(f"if {if_so}, type {error.as_it_is} (folders that hold the class folders)")
        elif isinstance(error, AmbiguousSplitError) and _are_classes(source, listing):
            texts.insert(0, f"if all are class folders, type {named_options({TRAIN: ['.']})}")
        is_named = root.name.lower() in OF_IMAGES or split_words(root.name)
        names = os.listdir(root)
        if not folders and not is_named and any(map(is_image, names)) and not any(map(may_have_labels, names)):
            texts.append(f"if it is a class folder itself, give {root.parent}")
    elif doubt is None and root != source:
        texts.append(f"sort the images of {root.name} into class folders, {root.name}/CLASS/image.jpg")
    if are_flat or not texts:
        texts.append(advise_tables(source, listing))
    return "".join(f"; {text}" for text in texts)


def _advise_lists(source: Path, listing: Listing) -> str:
    """Say how to read class folders by lists of splits, and without them."""
    tree = ClassTree.scan(source, listing.bounds(source), LeftOut())
    root = find_root(source, ".", listing)
    by_lists = advise_lists(source, lists_of_splits(tree), root.classes if root else ())
    by_lists = by_lists or "if so, write a CSV file with the columns path, label and split, and give that"
    patterns = [os.path.normpath(pattern) for pattern in root.patterns] if root else []
    return f"; {by_lists}" + f"; if all are, type {named_options({TRAIN: patterns})}" * bool(patterns)


def _are_classes(source: Path, listing: Listing) -> bool:
    """Whether each folder in a source holds images itself, as class folders do."""
    try:
        tree = ClassTree.scan(source, listing.bounds(source), LeftOut())
    except SourceError:
        return False
    return tree.filled() == {folder for content in tree.classes.values() for folder, _ in content.folders}


def _all_but(names: Sequence[str]) -> str:
    """Return options that name the first of several folders, sorted, as val, the others as train; "" if none do."""
    at = next((i for i, pair in enumerate(zip(names[0], names[-1], strict=False)) if pair[0] != pair[1]), None)
    if at is None:
        return ""
    pattern = f"{glob.escape(names[0][:at])}[!{names[0][at]}]*"
    fits = [name for name in names if matches(name, pattern)] == [*names[1:]]
    return named_options({TRAIN: [pattern], VAL: [glob.escape(names[0])]}) if fits else ""


def _advise_folder(what: str, folder: Path, listing: Listing) -> str:
    """Say to give a folder, which is opened first: if it is refused, say what to type for it, too."""
    try:
        with without_log():
            open_source(folder, outside=listing.outside)
    except (DatapipeError, SettingError) as error:
        message = getattr(error, "message", str(error)).removesuffix(f"; {LAYOUT}")
        typed = message.replace("type --", f"give {quote(str(folder))} --")
        return f"if {what} in {quote(str(folder))}, more has to be said: {typed}"
    if what == "the class folders are":
        return f"if {what} in {quote(str(folder))}, give that"
    return f"if {what} in {os.path.basename(folder)}, give {quote(str(folder))}"


def _advise_groups(source: Path, folders: Sequence[str], listing: Listing) -> list[str]:
    """Say how to take all folders as groups of classes, as parts of one set or as splits, or one that holds classes."""
    if root := find_root(source, ".", listing):
        if not shared_classes(root.folders):
            return [f"if its folders are groups of classes, type {named_options({TRAIN: root.patterns})}"]
        return [*_advise_twins(root.folders), _advise_joined(root)]
    candidates = {name: root for name in folders if (root := find_root(source, name, listing))}
    roots = {name: root for name, root in candidates.items() if len(root.classes) > 1}  # masks lie in one folder, too
    return [
        f"if the class folders are in {name}, type {named_options({TRAIN: root.patterns})}"
        if root.is_clear else _advise_joined(root)
        for name, root in roots.items()
    ][:NAMED]  # fmt: skip


def _advise_joined(root: Root) -> str:
    """Say how to join folders of the same classes."""
    if root.is_clear:
        return f"if its folders are parts of one set, type {named_options({TRAIN: root.patterns})}"
    return advise_joined({TRAIN: root.folders})


def _advise_twins(folders: Mapping[str, set[str]]) -> list[str]:
    """Say how to take folders of the same classes as splits: two in either order, of folds the first for validation."""
    texts = []
    names = sorted(folders)
    if len(names) == 2:
        for train, val in (names, names[::-1]):
            if folders[val] <= folders[train]:
                options = named_options({TRAIN: [glob.escape(train)], VAL: [glob.escape(val)]})
                texts.append(f"if {val} is for validation, type {options} (patterns)")
    elif not are_parts(names):
        options = named_options({TRAIN: [glob.escape(names[0])]})
        texts.append(f"if one of them is the data set, type {options} (patterns)")
    elif folders[names[0]] <= set[str]().union(*(folders[name] for name in names[1:])):
        options = split_options({TRAIN: names[1:], VAL: names[:1]}, []) or _all_but(names)
        texts += [f"if they are folds, type {options} (patterns; {names[0]} is for validation)"] if options else []
    return texts


def _advise_splits(
    source: Path, folders: Sequence[str], listing: Listing, may_be_classes: bool
) -> tuple[list[str], bool]:
    """Say which folders to take for the splits, and what to do about those that cannot be taken as they are.

    `may_be_classes`: whether folders that hold images themselves may be class folders. Returns the texts, and whether
    some folders have no class folders.
    """
    named = {name: splits_of(name) for name in folders}
    roots = {name: root for name in folders if (root := find_root(source, name, listing)) is not None}
    by_name = sorted(named, key=lambda name: (not is_split_name(name), name))
    names = {TRAIN: [name for name in by_name if TRAIN in named[name]]}
    names[VAL] = [name for name in by_name if VAL in named[name] and TRAIN not in named[name]]
    names[VAL] = names[VAL] or [name for name in by_name if named[name] == {TEST}]
    silent = [name for name in roots if not named[name]]
    condition = ""
    if silent and not names[TRAIN]:
        names[TRAIN], condition = silent, f"if {silent[0]} is for training, "
    elif silent and not names[VAL]:
        names[VAL], condition = silent, f"if {silent[0]} is for validation, "
    chosen, texts = _choose_roots(names, roots, folders)
    texts = [condition + text for text in texts]
    lacking = [name for split, its in names.items() if split not in chosen for name in its]
    if not names[TRAIN] and any(name in roots and roots[name].classes <= set(folders) for name in lacking):
        return [f"if the folders beside {lacking[0]} are train's classes, move them into a folder train"], False
    if not chosen and may_be_classes:
        lacking = []
    if lacking:
        images = f"the images of {format_some(lacking)} into class folders, such as {lacking[0]}/CLASS/image.jpg"
        command = advise_sorting(source / lacking[0], chosen[TRAIN].classes) if chosen else ""
        texts.append(
            f"{'to take more, ' if chosen else ''}sort {images}, with the same classes in each split"
            + (f", as this does: {command}" if command else "")
        )
    return texts, bool(lacking)


def _choose_roots(
    names: Mapping[str, Sequence[str]], roots: Mapping[str, Root], folders: Sequence[str]
) -> tuple[dict[str, Root], list[str]]:
    """Choose a folder for each split, and say what to type for it, and for the others that may be meant.

    `names`: the folders that may be a split's; `roots`: those of all `folders` that hold class folders. Returns what
    was chosen first, and the texts.
    """
    fitting = {split: [name for name in of_split if name in roots] for split, of_split in names.items()}
    choices: list[dict[str, Root]] = []
    for train in fitting[TRAIN]:
        vals = [name for name in fitting[VAL] if roots[name].classes <= roots[train].classes]
        if len(fitting[TRAIN]) > 1:
            vals = ([name for name in vals if _is_twin(train, name)] or vals)[:1]
        choices += [{TRAIN: roots[train], VAL: roots[val]} for val in vals] or [{TRAIN: roots[train]}]
    joined: dict[str, Root] = {}
    for split, of_split in names.items():
        of_both = [roots[name] for name in fitting[split]]
        if len(of_both) == len(of_split) > 1 and are_parts(of_split):
            of_both = _join_parts(of_split, of_both, folders)
        if TRAIN in joined:
            of_both = [root for root in of_both if root.classes <= joined[TRAIN].classes]
        if of_both:
            joined[split] = of_both[0]
    if not choices:
        return {}, []
    if not any(map(find_variants, names.values())):
        choices = [joined]
    are_several = joined not in choices
    if not all(root.is_clear for choice in [*choices, joined] for root in choice.values()):
        return joined, [advise_joined({split: root.folders for split, root in joined.items()})]
    *each, everything = (
        f"type {named_options({split: root.patterns for split, root in its.items()})}" for its in (*choices, joined)
    )
    text = ", or ".join(each[:NAMED]) + f"; to take all as one, {everything}" * are_several
    return joined, [f"{text} (patterns, any number of them); what no --split names is left out"]


def _is_twin(first: str, second: str) -> bool:
    """Whether two folders differ in the word for a split alone."""
    return have_twins([first, second]) and re.findall("[0-9]+", first) == re.findall("[0-9]+", second)


def _join_parts(names: Sequence[str], roots: list[Root], folders: Sequence[str]) -> list[Root]:
    """Join folders that are called as parts of a split to one root, if patterns name these and no other folders."""
    options = split_options({TRAIN: [*names]}, [folder for folder in folders if folder not in names])
    patterns = [option.partition("=")[2] for option in shlex.split(options)[1::2]]
    joined = Root(patterns, {folder: its for root in roots for folder, its in root.folders.items()})
    return [joined, *roots] if patterns and joined.is_clear and all(len(root.folders) == 1 for root in roots) else roots
