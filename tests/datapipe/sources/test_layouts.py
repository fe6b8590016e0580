"""Folders of images as people have them: each is read rightly, or refused with what to type."""

import logging
import re
import shlex
import shutil
import subprocess
import tarfile

import pytest

from datapipe.errors import SettingError, SourceError
from datapipe.sources import open_source


def put(root, *patterns):
    """Write files; `{a,b}` in a pattern stands for each of the texts, as in a shell."""
    for pattern in patterns:
        before, brace, rest = pattern.partition("{")
        if brace:
            texts, _, after = rest.partition("}")
            put(root, *(f"{before}{text}{after}" for text in texts.split(",")))
        else:
            (root / pattern).parent.mkdir(parents=True, exist_ok=True)
            (root / pattern).write_bytes(pattern.encode())
    return root


def labelled(source):
    """Which files there are of each class, by split."""
    return {
        split: [f"{source.classes[label]}: {samples.names[i]}" for i, label in enumerate(samples.labels.tolist())]
        for split, samples in source.splits.items()
    }


def advised(message):
    """What a message says to type: each as the words of a command, options or a folder."""
    folders = re.findall("are in ([^;]*), give that| lies in ([^;]*): give that", message)
    typed = re.findall("(?:type|give) ((?:--|/|').*?)(?: [(](?:patterns|folders)| if |, or |;|$)", message)
    return [shlex.split(text) for text in (*map("".join, folders), *typed)]


def open_advised(root, words):
    """Open a source as a message has said."""
    if not words[0].startswith("--"):
        root, words = words[0], words[1:]
    given = list(zip(words[::2], words[1::2], strict=True))
    kind, column = (
        dict(given).get(option, default) for option, default in (("--kind", "auto"), ("--label-column", None))
    )
    splits = [value for option, value in given if option == "--split"]
    return open_source(root, kind, splits=splits, label_column=column)


CAT_AND_DOG = ["cat: cat/1", "dog: dog/1"]
# Layouts that are read: their files, options, and what is read.
READ = {
    "class folders": (["{cat,dog}/1.jpg"], [], {"train": CAT_AND_DOG}),
    "tiny-imagenet's train": (["{n01,n02}/images/1.JPEG", "n01/n01_boxes.txt"], [],
                              {"train": ["n01: n01/images/1", "n02: n02/images/1"]}),
    "splits by other words": (["{training,eval,holdout}/{cat,dog}/1.jpg"], [],
                              {"train": CAT_AND_DOG, "val": CAT_AND_DOG}),
    "iNaturalist 2021": (["{2021_train,2021_valid}/{cat,dog}/1.jpg"], [], {"train": CAT_AND_DOG, "val": CAT_AND_DOG}),
    "a class called train": (["{train,bus}/1.jpg"], ["train=."], {"train": ["bus: bus/1", "train: train/1"]}),
    "a class called train in each split": (["{train,test}/{bus,car,train}/1.jpg"], [],
                                           {split: [f"{c}: {c}/1" for c in ("bus", "car", "train")]
                                            for split in ("train", "val")}),
    "classes that speak of a split": (["{train_x,test_tube,a}/1.jpg"], [],
                                      {"train": ["a: a/1", "test_tube: test_tube/1", "train_x: train_x/1"]}),
    "class called validation, beside others": (["{cat,dog,validation}/1.jpg"], ["train=."],
                                               {"train": [*CAT_AND_DOG, "validation: validation/1"]}),
    "a folder of images in each class, with more": (["{cat,dog}/images/1.jpg", "cat/images/more/2.jpg"], [],
                                                    {"train": ["cat: cat/images/1", "cat: cat/images/more/2",
                                                               "dog: dog/images/1"]}),
    "a folder in each split, as advised": (["{train,val}/images/{cat,dog}/1.jpg"],
                                           ["train=train/images", "val=val/images"],
                                           {"train": CAT_AND_DOG, "val": CAT_AND_DOG}),
    "a folder by its whole path": (["x/{train,val}/{cat,dog}/1.jpg"], ["train=/x/train", "val=/x/val"],
                                   {"train": CAT_AND_DOG, "val": CAT_AND_DOG}),
    "a few folders in class folders": (["cat/{1,2,3}.jpg", "cat/more/4.jpg", "dog/1.jpg"], [],
                                       {"train": [*(f"cat: cat/{i}" for i in (1, 2, 3, "more/4")), "dog: dog/1"]}),
    "junk of systems": (["{cat,dog}/1.jpg", "__MACOSX/cat/._1.jpg", "@eaDir/cat/1.jpg", "cat/@eaDir/1.jpg/2.jpg",
                         "cat/@__thumb/1.jpg", ".Trashes/1/1.jpg", "#recycle/cat/1.jpg", "$RECYCLE.BIN/a/1.jpg",
                         "cat/._1.jpg", "cat/Thumbs.db", "cat/.DS_Store", "dog/.ipynb_checkpoints/1.jpg",
                         "lost+found/1/1.jpg", "@Recycle/cat/1.jpg"], [], {"train": CAT_AND_DOG}),
    "split by hand": (["{fold0,fold1,fold2}/{cat,dog}/1.jpg"], ["train=fold[12]", "val=fold0"],
                      {"train": [f"{c}: fold{i}/{c}/1" for c in ("cat", "dog") for i in (1, 2)],
                       "val": CAT_AND_DOG}),
    "a root that looks wrong, by hand": (["{a,b}/{x,y}/1.jpg"], ["train=."],
                                         {"train": [f"{c}: {c}/{d}/1" for c in "ab" for d in "xy"]}),
    "classes that are numbers": (["{1,2}/1.jpg"], [], {"train": ["1: 1/1", "2: 2/1"]}),
    "numbered classes": (["class_{1,2}/1.jpg"], [], {"train": ["class_1: class_1/1", "class_2: class_2/1"]}),
    "ImageNet's ids beside a table": (["n0144076{4,5}/1.jpg", "noisy.csv"], [],
                                      {"train": [f"n0144076{i}: n0144076{i}/1" for i in (4, 5)]}),
    "numbers beside an example of an answer": (["{1,2}/1.jpg", "sample_submission.csv"], [],
                                               {"train": ["1: 1/1", "2: 2/1"]}),
    "numbers in each split beside a table": (["{train,val}/{1,2}/1.jpg", "names.csv"], [],
                                             {split: ["1: 1/1", "2: 2/1"] for split in ("train", "val")}),
    "only a test split": (["test/{cat,dog}/1.jpg"], [], {"val": CAT_AND_DOG}),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_a_layout_that_is_read(tmp_path, name):
    files, splits, expected = READ[name]
    splits = [split.replace("=/", f"={tmp_path}/raw/") for split in splits]
    assert labelled(open_source(put(tmp_path / "raw", *files), splits=splits)) == expected


# Layouts that are refused: their files, and what is said.
REFUSED = {
    # Too high.
    "ImageNet from Kaggle": (["ILSVRC/Data/CLS-LOC/{train,val}/{n01,n02}/1.JPEG", "ILSVRC/Annotations/1.xml"],
                             "CLS-LOC/train names a split.* are in /.*/raw/ILSVRC/Data/CLS-LOC, give that"),
    "a folder around all": (["wrapper/{cat,dog}/1.jpg"], "would be the only class; .* are in /.*/raw/wrapper, give"),
    "a wrapper, and junk of macOS": (["wrapper/{cat,dog}/1.jpg", "__MACOSX/wrapper/cat/._1.jpg"], "the only class"),
    "class first": (["{cat,dog}/{train,val}/1.jpg"], "cat/train names a split, below what would be a class"),
    "class first, and most images beside": (["{cat,dog}/{1,2,3,4}.jpg", "dog/Test/1.jpg"], "dog/Test names a split"),
    "k folds": (["{fold_0,fold_1}/{cat,dog}/1.jpg"], "fold_0/cat, fold_0/dog would be one class, fold_0"),
    "domains": (["{photo,sketch}/{cat,dog}/1.jpg"], "photo/cat, photo/dog would be one class, photo"),
    "Places365's letters": (["a/{airfield,alley}/1.jpg", "b/{bakery,bar}/indoor/1.jpg"],
                            "a/airfield, a/alley would be one class, a"),
    "images and masks": (["{cat,dog}/{images,masks}/1.png"], "cat/images, cat/masks would be one class"),
    "a folder around all, with an image": (["wrapper/{cat,dog}/{1,2}.jpg", "wrapper/cover.jpg"],
                                           "wrapper/cat, wrapper/dog would be one class, wrapper"),
    # Too low.
    "a class folder": (["1.jpg", "2.jpg"], r"holds no class folders; if it is a class folder itself, give /"),
    "Pascal VOC": (["JPEGImages/{1,2,3}.jpg", "SegmentationClass/1.png"], "JPEGImages would be a class"),
    "Oxford flowers": (["jpg/image_0000{1,2}.jpg", "imagelabels.mat"], "jpg would be the only class, and im"),
    "ImageNet with a flat val": (["train/{n01,n02}/1.JPEG", "val/ILSVRC2012_val_00000001.JPEG"], "without its labels"),
    # Splits.
    "an unknown word": (["{train,validierung}/{cat,dog}/1.jpg"], "train names a split, and validierung does not"),
    "a known word that is not train": (["{images,validation}/{cat,dog}/1.jpg"], "validation names a split, and im"),
    "extra images": (["{train,test,extra}/{cat,dog}/1.jpg"], "extra does not; type --split train=train --split val="),
    "COCO": (["{train2017,val2017}/1.jpg", "annotations/1.json"], "; sort the images of train2017, val2017 into class"),
    "a class that is called as a split": (["{cat,dog,test_data}/1.jpg"], "test_data names a split, and would be a"),
    "a class called train, or a split": (["{cat,dog,train}/1.jpg"], "train names a split, .* type --split train=. "),
    "a split in a split": (["train/{cat,dog}/1.jpg", "train/val/cat/2.jpg"], "val names a split, and would be a"),
    "scenes": (["seg_{train,test}/{sea,city}/1.jpg", "seg_pred/1.jpg"], "seg_pred .* train=seg_train --split val="),
    "Market-1501": (["bounding_box_{train,test}/1.jpg", "query/1.jpg"], "bounding_box_test names a split, and query"),
    "contest": (["{test,contest}/{cat,dog}/1.jpg"], "if contest is for training, type --split train=contest "),
    "two folders in each group": (["A/x/y/{cat,dog}/1.jpg", "B/x/y/{cat,dog}/1.jpg"], "A/x/y/cat, A/x/y/dog would be"),
    "Stanford Cars": (["cars_{train,test}/1.jpg"], "beside the class folders.*; if a table has their classes"),
    "synonyms": (["{train,val,validation}/{cat,dog}/1.jpg"], "holds both val .* and validation"),
    "train and val in one name": (["train_val2018/{Aves,Fungi}/1.jpg"], "has train and val in it"),
    "CycleGAN": (["{trainA,trainB,testA,testB}/1.jpg"], "holds 2 folders for train: trainA, trainB"),
    # Of other kinds.
    "Kaggle's archive": (["archive.zip", "{train,sample}.csv"], "; archive.zip is an archive: unpack .*; sample.csv "
                         r"\(and 1 other like it\) is a table: give it"),
    "archives of splits": (["{train,val}/images.zip"], "raw/train: holds no .*; images.zip is an archive: unpack"),
    "an archive beside text": (["a/x.txt", "train.zip"], "train.zip is an archive: unpack it"),
    "TFRecords": (["x.tfrecord-0000{0,1}-of-00002"], r"and 1 other like it\) is not read: write its images as files"),
    "HDF5": (["train.h5", "val.hdf5"], "train.h5 .* is not read: write its images as files"),
    "an image of a filesystem": (["train.sqsh", "train.txz"], "train.txz is an archive: .*; train.sqsh is not read"),
    "a table that is none of ours": (["1.jpg", "labels.tsv"], "labels.tsv is a table: give it or its folder"),
    "LMDB": (["train.lmdb/{data,lock}.mdb"], "train.lmdb/data.mdb .* is not read: write its images"),
    "compressed shards": (["train-0.tar.gz"], "unpack it to .tar if it is a shard, or to a folder if"),
    "several CIFARs": (["cifar-10-batches-py/batches.meta", "cifar-100-python/meta"], "holds several data sets"),
    "several archives of CIFAR": (["cifar-10-{binary,python}.tar.gz"], "cifar-10-python.tar.gz: give one of them"),
    "a split without a class's folder": (["train/{cat,dog}/1.jpg", "val/{cat,cow}/1.jpg"], "does not have: cow"),
    "a split without a class's images": (["train/cat/1.jpg", "train/dog/1.txt", "val/{cat,dog}/1.jpg"],
                                         "1 class of val has no images in train: dog"),
    "an empty split": (["train/{cat,dog}/1.jpg", "val/{cat,dog}/1.webp"], "split val holds no images"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_layout_that_is_refused(tmp_path, name):
    files, message = REFUSED[name]
    with pytest.raises(SourceError, match=message) as caught:
        open_source(put(tmp_path / "raw", *files))
    for words in advised(str(caught.value)):
        open_advised(tmp_path / "raw", words)


ROWS = "path,label\nimages/1.jpg,a\nimages/2.jpg,b\n"
TRAIN_ROWS = "path,label\ntrain/1.jpg,a\ntrain/2.jpg,b\n"
AS_CLASSES = "--split train=."
# Layouts that are refused: their files, tables, all that may be typed and how many images of each split that gives, and
# what is said beside.
ADVISED = {
    "fruits-360": (["{Training,Test}/{Apple,Kiwi}/1.jpg", "{test-multiple_fruits,papers}/1.jpg"], {},
                   {"--split train=Training --split val=Test": {"train": 2, "val": 2}}, "no --split names is left out"),
    "ASL alphabet": (["asl_alphabet_train/asl_alphabet_train/{A,del}/1.jpg",
                      "asl_alphabet_test/asl_alphabet_test/A_test.jpg"], {},
                     {"--split train=asl_alphabet_train/asl_alphabet_train": {"train": 2}},
                     "sort the images of asl_alphabet_test into class folders"),
    "New Plant Diseases": (["New Plant (Augmented)/{train,valid}/{scab,rust}/1.jpg", "test/test/1.jpg"], {},
                           {"'{root}/New Plant (Augmented)'": {"train": 2, "val": 2}}, "if the data set is in New"),
    "New Plant Diseases, as unpacked": (["New Plant/New Plant/{train,valid}/{scab,rust}/1.jpg", "test/test/1.jpg"], {},
                                        {"'{root}/New Plant/New Plant'": {"train": 2, "val": 2}}, "data set is in New"),
    "ImageNet-100 of Kaggle": (["train.X{1,2}/{a,b}/1.jpg", "train.X{3,4}/{c,d}/1.jpg", "val.X/{a,b,c,d}/1.jpg"], {},
                               {"--split train='train.X*' --split val=val.X": {"train": 8, "val": 4}}, "holds 4"),
    "a folder above Tiny ImageNet": (["tiny/train/{n01,n02}/images/1.JPEG", "tiny/{val,test}/images/1.JPEG"], {},
                                     {"{root}/tiny --split train=train": {"train": 2}, AS_CLASSES: {"train": 4}},
                                     "more has to be said: .*sort the images of val into"),
    "a folder above a data set and its copy": (
        ["{x,x/x}/{train,val,test}/{a,b}/1.jpg"], {},
        {"{root}/x/x": {"train": 2, "val": 2}, "{root}/x --split train=train --split val=val": {"train": 2, "val": 2},
         AS_CLASSES: {"train": 12}}, "test names a split, and x does not"),
    "class folders beside val": (["{a,b}/1.jpg", "val/{a,b}/2.jpg"], {}, {}, "move them into a folder train"),
    "SVHN": (["{train,test,extra}/1.png", "train/digitStruct.mat"], {}, {AS_CLASSES: {"train": 3}},
             "; sort the images of train, test into class folders, such as train/CLASS/image.jpg, .*; if a table has"),
    "flat splits": (["{train,val}/{1,2}.jpg"], {}, {}, "; sort the images of train, val into .*; if a table has"),
    "Tiny ImageNet": (["train/{n01,n02}/images/1.JPEG", "{val,test}/images/1.JPEG", "val/val_annotations.txt"], {},
                      {"--split train=train": {"train": 2}}, "to take more, sort the images of val into class folders"),
    "Places365": (["data_256/a/{airfield,apse/indoor}/1.jpg", "data_256/z/zoo/1.jpg", "val_256/1.jpg"], {},
                  {"--split train='data_256/*'": {"train": 3}, AS_CLASSES: {"train": 4}}, "images of val_256 into"),
    "groups in splits": (["{train,val}/{Aves,Fungi}/{1,2}/1.jpg"], {},
                         {"--split train=train/Aves --split train=train/Fungi "
                          "--split val=val/Aves --split val=val/Fungi": {"train": 4, "val": 4},
                          "--split train=train --split val=val": {"train": 4, "val": 4}}, "would be one class"),
    "Caltech-UCSD Birds": (["CUB/images/{1.Black,2.Foot}/1.jpg", "CUB/docs/1.png", "masks/{1.Black,2.Foot}/1.png"], {},
                           {"--split train=masks": {"train": 2}, AS_CLASSES: {"train": 5}}, "would be one class, CUB"),
    "malaria's cells": (["{a,b}/{1,2}.jpg", "x/{a,b}/{1,2}.jpg"], {},
                        {"--split train=x": {"train": 4}, AS_CLASSES: {"train": 8}}, "would be one class, x"),
    "a split in words": (["train [x]/{a,b}/1.jpg", "val 'y'/{a,b}/1.jpg", "extra/a/1.jpg"], {},
                         {"--split train='train [[]x]' --split val=\"val 'y'\"": {"train": 2, "val": 2}}, "extra does"),
    "variants of a split": (["{train_mini,train,val}/{a,b}/1.jpg"], {},
                            {"--split train=train --split val=val": {"train": 2, "val": 2},
                             "--split train=train_mini --split val=val": {"train": 2, "val": 2}}, "all of train"),
    "one split in two spellings": (["{Train,train,val}/{a,b}/1.jpg"], {},
                                   {"--split train=Train --split val=val": {"train": 2, "val": 2},
                                    "--split train=train --split val=val": {"train": 2, "val": 2},
                                    "--split train=Train --split train=train --split val=val": {"train": 4, "val": 2}},
                                   "holds Train and train, all of train; .*; to take all as one, type"),
    "two sizes": (["{train,val}_{224,512}/{a,b}/1.jpg"], {},
                  {"--split train=train_224 --split val=val_224": {"train": 2, "val": 2},
                   "--split train=train_512 --split val=val_512": {"train": 2, "val": 2},
                   "--split train=train_224 --split train=train_512 --split val=val_224 --split val=val_512":
                   {"train": 4, "val": 4}}, "holds train_224 and train_512, all of train"),
    "two sizes of train alone": (["train_{224,512}/{a,b}/1.jpg"], {},
                                 {"--split train=train_224": {"train": 2}, "--split train=train_512": {"train": 2},
                                  "--split train=train_224 --split train=train_512": {"train": 4}}, "all of train"),
    "clean and noisy": (["train_{clean,noisy}/{a,b}/1.jpg", "val/{a,b}/1.jpg"], {},
                        {"--split train=train_clean --split val=val": {"train": 2, "val": 2},
                         "--split train=train_noisy --split val=val": {"train": 2, "val": 2}}, "all of train"),
    "seen and unseen": (["train/{a,b}/1.jpg", "val_{seen,unseen}/{a,b}/1.jpg"], {},
                        {"--split train=train --split val=val_seen": {"train": 2, "val": 2},
                         "--split train=train --split val=val_unseen": {"train": 2, "val": 2}}, "all of val"),
    "two words for val": (["{train,val,validation}/{a,b}/1.jpg"], {},
                          {"--split train=train --split val=val": {"train": 2, "val": 2},
                           "--split train=train --split val=validation": {"train": 2, "val": 2}}, "mean the same"),
    "numbered parts": (["train_part{1,2}/{a,b}/1.jpg", "val/{a,b}/1.jpg"], {},
                       {"--split train=train_part1 --split train=train_part2 --split val=val": {"train": 4, "val": 2}},
                       "holds 2 folders for train"),
    "train and val of other classes": (["train/x/{a,b}/1.jpg", "val/c/1.jpg"], {},
                                       {"--split train=train/x": {"train": 2}}, "with the same classes in each"),
    "two data sets side by side": (["{a,b}/{x,y}/1.jpg", "a/z/images/1.jpg"], {},
                                   {"--split train=a --split val=b": {"train": 3, "val": 2},
                                 "--split train=a --split train=b": {"train": 5}, AS_CLASSES: {"train": 5}},
                                "if not, rename them .*, such as a/a_x"),
    "Omniglot": (["images_background/{Greek,Latin}/character0{1,2}/1.png",
                  "images_evaluation/{Ge'ez,Tengwar}/character0{1,2}/1.png"], {},
                 {"--split train=images_background/Greek --split train=images_background/Latin "
                  "--split val='images_evaluation/Ge'\"'\"'ez' --split val=images_evaluation/Tengwar":
                  {"train": 4, "val": 4}}, "if images_background is for training, if classes of one name are the same"),
    "an alphabet's characters": (["{Greek,Latin,Thai}/c0{1,2}/1.png"], {},
                                 {"--split train=Greek": {"train": 2},
                                  "--split train=Greek --split train=Latin --split train=Thai": {"train": 6},
                                  AS_CLASSES: {"train": 6}}, "rename them .*, such as Greek/Greek_c01"),
    "groups of classes": (["Apple/{healthy,scab}/1.jpg", "Corn/{healthy,rust}/1.jpg"], {},
                          {"--split train=Apple --split train=Corn": {"train": 4}, AS_CLASSES: {"train": 4}},
                          "such as healthy in Apple and in Corn, .*if not, rename them"),
    "ten folds": (["fold_{0,1,2,3,4,5,6,7,8,9}/{a,b}/1.jpg"], {},
                  {"--split train='fold_[!0]*' --split val=fold_0": {"train": 18, "val": 2},
                   "--split train='*'": {"train": 20}, AS_CLASSES: {"train": 20}}, "fold_0 is for validation"),
    "one set in three colours": (["{color,gray,masked}/{a,b}/1.jpg"], {},
                                 {"--split train=color": {"train": 2},
                                  "--split train=color --split train=gray --split train=masked": {"train": 6},
                                  AS_CLASSES: {"train": 6}},
                                 "if one of them is the data set"),
    "groups of other classes": (["{Apple}/{mildew,scab}/1.jpg", "Corn/{blight,rust}/1.jpg"], {},
                                {"--split train='*'": {"train": 4}, AS_CLASSES: {"train": 4}}, "are groups of classes"),
    "splits in a language that is not known": (
        ["{entrenamiento,validacion}/{a,b}/1.jpg"], {},
        {"--split train=entrenamiento --split val=validacion": {"train": 2, "val": 2},
         "--split train=validacion --split val=entrenamiento": {"train": 2, "val": 2},
         "--split train=entrenamiento --split train=validacion": {"train": 4}, AS_CLASSES: {"train": 4}},
        "if validacion is for validation, type .*; if entrenamiento is for validation, type"),
    "folds": (["fold{0,1,2}/{a,b}/1.jpg"], {},
              {"--split train=fold1 --split train=fold2 --split val=fold0": {"train": 4, "val": 2},
               "--split train='*'": {"train": 6}, AS_CLASSES: {"train": 6}}, "if they are folds.*; if .* parts of one"),
    "HAM10000": (["HAM10000_images_part_{1,2}/1.jpg"], {"HAM10000_metadata.csv": "image_id,dx\n1,nv\n"},
                 {AS_CLASSES: {"train": 2}}, "may be parts of .*; if HAM10000_metadata.csv has their la.*-column dx"),
    "NIH chest X-rays": (["images_0{01,02,12}/images/1.png"], {}, {AS_CLASSES: {"train": 3}}, "parts of one set"),
    "one part": (["part_a/{1,2}.jpg"], {}, {AS_CLASSES: {"train": 2}}, "part_a may be a part of one set of images"),
    "numbers beside a table": (["{1,2}/1.jpg"], {"labels.csv": "path,label\n1/1.jpg,a\n2/1.jpg,b\n"},
                               {AS_CLASSES: {"train": 2}, "--kind csv": {"train": 2}}, "differ by a number alone"),
    "numbers beside another table": (["p{1,2}/1.jpg"], {"labels.xlsx": ""}, {AS_CLASSES: {"train": 2}}, "labels.xlsx"),
    "images beside a table": (["images/{1,2}.jpg"], {"labels.csv": ROWS},
                              {AS_CLASSES: {"train": 2}, "--kind csv": {"train": 2}}, "images would be the only"),
    "a flat folder beside a table": (["photos/{1,2}.jpg"],
                                     {"metadata.csv": "path,label\nphotos/1.jpg,a\nphotos/2.jpg,b\n"},
                                     {AS_CLASSES: {"train": 2}, "--kind csv": {"train": 2}},
                                     "photos would be the only class, and metadata.csv may have the labels"),
    "a table in a flat folder": (["photos/{1,2}.jpg"], {"photos/labels.csv": "path,label\n1.jpg,a\n2.jpg,b\n"},
                                 {AS_CLASSES: {"train": 2}}, "photos would be the only class, and labels.csv may"),
    "CelebA": (["align/align/{1,2}.jpg"], {"list_attr.csv": "image_id,Smiling\n1.jpg,-1\n2.jpg,1\n"},
               {AS_CLASSES: {"train": 2}}, "align/align would be the only class, and list.*; if list_attr.csv has "),
    "CelebA without its tables": (["align/align/{1,2}.jpg"], {}, {AS_CLASSES: {"train": 2}}, "would be the o"),
    "flat folders beside a table": (["{scans,photos}/{1,2}.jpg"],
                                    {"labels.csv": "path,label\nscans/1.jpg,a\nscans/2.jpg,b\nphotos/1.jpg,a\n"},
                                    {AS_CLASSES: {"train": 4}, "--kind csv": {"train": 3}},
                                    "labels.csv names images of photos, scans, and its labels are not these folders"),
    "class folders, and splits in a table": (
        ["{cat,dog}/{1,2}.jpg"], {"all.csv": "path,label,split\n" + "".join(
            f"{c}/{i}.jpg,{c},{s}\n" for c in ("cat", "dog") for i, s in ((1, "train"), (2, "test")))},
        {AS_CLASSES: {"train": 4}, "--kind csv": {"train": 2, "val": 2}}, "and its column split says the splits"),
    "ids of images in a table": (["scans/x{1,2}.jpg", "photos/x{3,4}.jpg"],
                                 {"info.csv": "isic_id;dx\nx1;a\nx2;b\nx3;a\nx4;b\n"},
                                 {AS_CLASSES: {"train": 4}}, "info.csv names images of photos, scans, and its labels"),
    "flat splits beside a table": (["{train,test}/{1,2}.jpg"], {"labels.csv": TRAIN_ROWS},
                                   {"--kind csv": {"train": 2}}, "sort the images of train, test into"),
    "flat splits with a table in each": (["{train,test}/{1,2}.jpg", "test/metadata.csv"],
                                         {"train/metadata.csv": "file_name,label\n1.jpg,a\n2.jpg,b\n"}, {},
                                         "if test/metadata.csv has labels of the images beside it, write a CSV file"),
    "German traffic signs, of Kaggle": (
        ["Train/{0,1,2}/1.png", "Test/{1,2}.png", "Meta/{0,1,2}.png"],
        {"Train.csv": "Width,ClassId,Path\n" + "".join(f"9,{c},Train/{c}/1.png\n" for c in (0, 1, 2)),
         "Test.csv": "Width,ClassId,Path\n9,0,Test/1.png\n9,2,Test/2.png\n",
         "Meta.csv": "Path,ClassId,ShapeId\nMeta/0.png,0,1\n"},
        {"--split train=Train": {"train": 3},
         "--kind csv --label-column ClassId --split train=Train.csv --split val=Test.csv": {"train": 3, "val": 2}},
        "if Test.csv, Train.csv have their labels, type"),
    "German traffic signs, written as PNG": (
        ["Final_Training/Images/{00000,00001}/{1,2}.png", "Final_Test/Images/{1,2}.png"],
        {f"Final_Training/Images/0000{c}/GT-0000{c}.csv": f"Filename;ClassId\n1.ppm;{c}\n2.ppm;{c}\n" for c in (0, 1)}
        | {"GT-final_test.csv": "Filename;Width;ClassId\n1.ppm;9;1\n2.ppm;9;0\n"},
        {"--split train=Final_Training/Images": {"train": 4},
         "--split train=Final_Training --split val=Final_Test": {"train": 4, "val": 2}},
        "sort the images of Final_Test into .*; if GT-final_test.csv has their labels, --kind csv reads it .*-column"),
    "a folder above German traffic signs": (
        ["GTSRB/Final_Training/Images/{00000,00001}/{1,2}.png", "GTSRB/Final_Test/Images/{1,2}.png"], {},
        {"{root}/GTSRB --split train=Final_Training/Images": {"train": 4},
         "{root}/GTSRB --split train=Final_Training --split val=Final_Test": {"train": 4, "val": 2},
         AS_CLASSES: {"train": 6}}, "if the data set is in /.*/GTSRB, more has to be said"),
    "Oxford pets": (["images/{Abyssinian,beagle}_{1,2}.jpg", "annotations/trimaps/Abyssinian_{1,2}.png"], {},
                    {AS_CLASSES: {"train": 6}}, "images would be a class"),
    "a table of images that are not there": (["{train,val}/{1,2}.jpg"], {"labels.csv": "path,label\n9.jpg,a\n"},
                                             {}, "if labels.csv has their labels, write a CSV file with the columns"),
}  # fmt: skip


@pytest.mark.parametrize("name", ADVISED)
def test_what_a_refusal_says_to_type_works(tmp_path, name):
    files, tables, expected, message = ADVISED[name]
    root = put(tmp_path / "raw", *files)
    for table, rows in tables.items():
        (root / table).write_text(rows)
    with pytest.raises(SourceError, match=message) as caught:
        open_source(root)
    typed = advised(str(caught.value))
    assert typed == [shlex.split(text.replace("{root}", str(root))) for text in expected]
    for words, counts in zip(typed, expected.values(), strict=True):
        assert {split: len(samples) for split, samples in open_advised(root, words).splits.items()} == counts


def test_images_that_are_not_read_are_written_as_said(tmp_path, monkeypatch):
    root = put(tmp_path / "raw")
    for place in ("Images/00000/1.ppm", "Images/00001/2.ppm"):
        (root / place).parent.mkdir(parents=True)
        (root / place).write_bytes(b"P6 2 1 255\nabcdef")
    with pytest.raises(SourceError, match=r"1.ppm \(and 1 other like it\) is an image that is not read: ") as caught:
        open_source(root)
    program = shlex.split(re.search("run in the source (python -c .*)", str(caught.value))[1])[2]
    monkeypatch.chdir(root)
    exec(program, {})
    assert labelled(open_source(root / "Images")) == {"train": ["00000: 00000/1", "00001: 00001/2"]}


def test_jpeg_files_that_are_called_otherwise_are_renamed_as_said(tmp_path, monkeypatch):
    root = put(tmp_path / "raw", "{cat,dog}/1.jfif")
    with pytest.raises(
        SourceError, match=r"cat/1\.jfif .* is called otherwise than JPEG files that are read"
    ) as caught:
        open_source(root)
    program = shlex.split(re.search("run in the source (python -c .*)", str(caught.value))[1])[2]
    monkeypatch.chdir(root)
    exec(program, {})
    assert labelled(open_source(root)) == {"train": ["cat: cat/1.jfif", "dog: dog/1.jfif"]}


@pytest.mark.parametrize(("files", "is_said"), [
    (["{cat,dog}/1.jpg", "sample.png"], True), (["{1,2}.jpg", "notes/x.txt"], False),
])  # fmt: skip
def test_images_beside_class_folders_are_to_be_moved(tmp_path, files, is_said):
    with pytest.raises(SourceError, match="lies beside the class folders, not in one") as caught:
        open_source(put(tmp_path / "raw", *files))
    assert ("; move images that lie so into their class folders, or elsewhere;" in str(caught.value)) == is_said


PETS = [f"{name}: images/{name}_{i}" for name in ("Abyssinian", "great_pyrenees") for i in (1, 2)]
CATS = [f"{name}: train/{name}.{i}" for name in ("cat", "dog") for i in (0, 1)]
# Layouts without tables: what is read of them by the table that the advised command writes.
LISTED = {
    "Oxford pets": (["images/{Abyssinian,great_pyrenees}_{1,2}.jpg", "annotations/trimaps/{Abyssinian,x}_{1,2,3}.png"],
                    {"train": PETS}),
    "dogs and cats": (["train/{cat,dog}.{0,1}.jpg", "test1/{1,2}.jpg"], {"train": CATS}),
    "names in two splits": (["{train,val}/{cat,dog}.{0,1}.jpg"],
                            {"train": CATS, "val": [text.replace("train", "val") for text in CATS]}),
    "SUN397": (["a/{abbey,apse/indoor,apse/outdoor}/sun_1.jpg", "b/bar/sun_2.PNG",
                "a/abbey/{.ipynb_checkpoints,@eaDir,__MACOSX}/sun_1.jpg"],
               {"train": [f"{c}: {c}/sun_1" for c in ("a/abbey", "a/apse/indoor", "a/apse/outdoor")]
                         + ["b/bar: b/bar/sun_2"]}),
    "splits in classes": (["{cat,dog}/{train,Val}/1.jpg"],
                          {"train": ["cat: cat/train/1", "dog: dog/train/1"],
                           "val": ["cat: cat/Val/1", "dog: dog/Val/1"]}),
    "images of two splits in classes": (["{cat,dog}/{train_1,test_2_aligned}.jpg"],
                                        {"train": ["cat: cat/train_1", "dog: dog/train_1"],
                                         "val": ["cat: cat/test_2_aligned", "dog: dog/test_2_aligned"]}),
    "splits in a folder of images": (["images/{train,val}/{1,2}.jpg", "more/{train,val}/1.jpg"], None),
    "names that say no classes": (["images/{1,2,3,4}.jpg"], None),
    "names of one kind": (["images/img_{1,2,3,4}.jpg"], None),
    "names of other things": (["images/{a,b,c}{1,2}x.jpg", "images/d1.jpg"], None),
    "a copy in a copy": (["flowers/{a,b}/1.jpg", "flowers/flowers/{a,b}/1.jpg"], None),
}  # fmt: skip


@pytest.mark.parametrize("name", LISTED)
def test_a_table_is_written_as_said(tmp_path, name):
    files, expected = LISTED[name]
    root = put(tmp_path / "the raw", *files)
    with pytest.raises(SourceError) as caught:
        open_source(root)
    command = re.search('run in (.*), and give the labels.csv that it writes: (python -c .*?\\)")', str(caught.value))
    assert (command is None) == (expected is None)
    if command:
        subprocess.run(command[2], shell=True, check=True, timeout=60, cwd=shlex.split(command[1])[0])
        read = labelled(open_source(root / "labels.csv"))
        assert {split: sorted(of_split) for split, of_split in read.items()} == expected


@pytest.mark.parametrize("folder", ["val/images", "val"])
def test_images_are_sorted_by_their_list_as_said(tmp_path, folder):
    root = put(
        tmp_path / "tiny imagenet", "train/{n01,n02}/images/1.JPEG", f"{folder}/val_{{0,1}}.JPEG", "test/images/0.JPEG"
    )
    (root / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn02\t0\t32\nval_1.JPEG\tn01\t0\t9\n")
    with pytest.raises(SourceError) as caught:
        open_source(root)
    command = re.search("as this does: (.*?); if a table", str(caught.value))[1]
    subprocess.run(command, shell=True, check=True, timeout=60)
    assert labelled(open_source(root))["val"] == ["n01: n01/val_1", "n02: n02/val_0"]


@pytest.mark.parametrize("given", ["", "MNIST"])
def test_a_folder_above_a_data_set_of_another_kind(tmp_path, given):
    raw = put(tmp_path / "data", "MNIST/raw/t10k-images-idx3-ubyte.gz", "MNIST/processed/test.pt") / "MNIST" / "raw"
    for name, header in (
        ("train-images-idx3", [3, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 1]),
        ("train-labels-idx1", [1, 0, 0, 0, 2]),
    ):
        (raw / f"{name}-ubyte").write_bytes(bytes([0, 0, 8, *header, 0, 1]))
    (raw / "t10k-images-idx3-ubyte.gz").unlink()
    with pytest.raises(SourceError, match=f"a data set of the kind idx lies in {raw}: give that$") as caught:
        open_source(tmp_path / "data" / given)
    (words,) = advised(str(caught.value))
    assert len(open_advised(raw, words).splits["train"]) == 2


# Tables that say of class folders what these say, or nothing of labels.
AGREE = {
    "names": "path,label\n../raw/cat/1.jpg,Cat\ndog/1.jpg,dog\n",
    "numbers": "id,path,label\n7,cat/1.jpg,0\n8,cat/2.jpg,0\n9,dog/1.jpg,1\n",
    "one folder": "path,breed,class\ncat/1.jpg,siam,cat\ncat/2.jpg,tabby,cat\n",
    "sizes alone": "path,width,height\ncat/1.jpg,224,20\ncat/2.jpg,224,21\ndog/1.jpg,224,20\n",
    "paths alone": "path\ncat/1.jpg\n",
    "other images": "path,label\nbird/1.jpg,a\nbird/2.jpg,b\n",
    "classes": "class,weight\ncat,1\ndog,2\n",
    "nothing": "",
}


@pytest.mark.parametrize("name", AGREE)
def test_class_folders_beside_a_table_that_agrees(tmp_path, name):
    root = put(tmp_path / "raw", "{cat,dog}/{1,2}.jpg")
    (root / "metadata.csv").write_text(AGREE[name])
    assert len(open_source(root).splits["train"]) == 4


def test_a_long_table_beside_class_folders_is_looked_at_throughout(tmp_path):
    root = put(tmp_path / "raw", "{scans,photos}/1.jpg", f"scans/{{{','.join(f'{i}' for i in range(9))}}}.jpg")
    rows = [f"{folder}/1.jpg,{folder},{'x' * 100}\n" for folder in ("scans", "photos") for _ in range(5000)]
    (root / "all.csv").write_text("path,label,text\n" + "".join(rows))
    assert len(open_source(root).splits["train"]) == 10
    (root / "all.csv").write_text("path,label,text\n" + "".join(rows).replace("scans,", "other,", 1).replace(
        "photos/1.jpg,photos", "photos/1.jpg,other"))  # fmt: skip
    with pytest.raises(SourceError, match=r"all\.csv names images of photos, scans, and its labels are not these"):
        open_source(root)


# Folders that patterns join: their files, the options, and the refusal; "": none, but a line in the log.
JOINED = [
    (["{Apple,Corn}/{healthy,sick}/1.jpg"], ["train=*"], "2 folders .* joined for train, and 2 .*: healthy, sick"),
    (["train/{A,B}/{x,y}/1.jpg", "val/x/1.jpg"], ["train=train/*", "val=val"], "if not, rename them .* train/A/A_x"),
    (["g1/{a,b,c,d}/1.jpg", "g2/{d,e,f,g}/1.jpg"], ["train=g?"], "1 class is in more than one: d"),
    (["{Apple,Corn}/{healthy,sick}/1.jpg"], ["train=Apple", "train=Corn"], ""),
    (["fold{1,2}/{a,b,c}/1.jpg", "fold3/{a,b}/1.jpg", "fold0/a/1.jpg"], ["train=fold[1-3]", "val=fold0"], ""),
    (["train/part_{x,y}/{a,b}/1.jpg"], ["train=train/*"], ""),
]  # fmt: skip


@pytest.mark.parametrize(("files", "splits", "message"), JOINED)
def test_classes_of_one_name_in_folders_that_are_joined(tmp_path, caplog, files, splits, message):
    root = put(tmp_path / "raw", *files)
    if message:
        with pytest.raises(SourceError, match=message):
            open_source(root, splits=splits)
    else:
        open_source(root, splits=splits)
        assert re.search(r"[23] folders are joined for train; [23] classes are in more than one: ", caplog.text)


def test_two_data_sets_of_one_kind_are_both_named(tmp_path):
    root = put(tmp_path / "data", *(f"{name}/raw/train-{what}-ubyte" for name in ("MNIST", "FashionMNIST")
                                    for what in ("images-idx3", "labels-idx1")))  # fmt: skip
    with pytest.raises(
        SourceError, match=r"idx lies in .*/FashionMNIST/raw, idx lies in .*/MNIST/raw: give one of them"
    ):
        open_source(root)


@pytest.mark.parametrize("inside", ["{train,val}/{a,b}/1.jpg", "{n01440764,n01443537}/{1,2}.jpg"])
def test_tars_of_folders_are_unpacked_as_said(tmp_path, inside):
    root = put(tmp_path / "the raw", inside)
    expected = labelled(open_source(root))
    for folder in sorted(path for path in root.iterdir()):
        with tarfile.open(f"{folder}.tar", "w") as tar:
            for place in sorted(folder.iterdir()):
                tar.add(place, place.name)
        shutil.rmtree(folder)
    with pytest.raises(
        SourceError, match=r"but no label .*; if .*, unpack each tar into a folder of its name"
    ) as caught:
        open_source(root)
    command = str(caught.value).rpartition(f"and give {shlex.quote(str(root))}: ")[2]
    name = re.search(r"mkdir (\S+)", command)[1]
    for tar in sorted(root.glob("*.tar")):
        subprocess.run(command.replace(name, tar.stem), shell=True, check=True, timeout=60)
    assert labelled(open_source(root)) == expected


def test_a_pattern_that_names_a_table(tmp_path):
    root = put(tmp_path / "raw", "{train,val}/{1,2}.jpg")
    (root / "labels.csv").write_text(TRAIN_ROWS)
    with pytest.raises(SettingError, match=r"'labels.csv' names files in .*, not folders .*, add --kind csv$"):
        open_source(root, splits=["train=labels.csv"])
    assert len(open_source(root, "csv", splits=["train=labels.csv"]).splits["train"]) == 2


def test_folders_without_images_beside_splits_are_left_out(tmp_path, caplog):
    root = put(tmp_path / "raw", "{train,val}/{cat,dog}/1.jpg", "meta/train.txt", "devkit/data/{meta.mat,.x.jpg}")
    (root / "logs").mkdir()
    put(root, "train_labels/1.txt")
    assert labelled(open_source(root)) == {"train": CAT_AND_DOG, "val": CAT_AND_DOG}
    message = r"left out 4 entries \(beside the folders of splits, without images\): devkit, logs, meta, train_l"
    assert re.search(message, caplog.text)
    with pytest.raises(SourceError, match=message.replace("left out ", "--strict: .*")):
        open_source(root, strict=True)
    put(root, "devkit/data/more.tar")
    with pytest.raises(SourceError, match="names a split, and devkit does not; type --split train=train --split val="):
        open_source(root)


def test_an_example_of_an_answer_is_left_out(tmp_path, caplog):
    root = put(tmp_path / "raw", "{train,test}/{1,2}.jpg", "sample_submission.csv")
    (root / "train.csv").write_text(TRAIN_ROWS)
    (root / "test.csv").write_text("path\ntest/1.jpg\n")
    for splits in ([], ["train=train.csv"]):
        assert len(open_source(root, splits=splits).splits["train"]) == 2
        assert re.search("left out . entr.*: sample_submission.csv", caplog.text)
        caplog.clear()


@pytest.mark.parametrize(
    ("files", "splits", "num_warnings"),
    [
        (["{train,test}/{bus,car,train}/1.jpg"], [], 0),
        (["{train,test}/{bus,train}/1.jpg"], [], 0),
        (["{train,test}/{bus,car,train}/1.jpg"], ["train=train", "val=test"], 0),
        (["{bus,car,train}/1.jpg"], ["train=."], 0),
        (["train/{bus,car,train}/1.jpg", "test/{bus,car}/1.jpg"], [], 1),
        (["train/{bus,car,train}/1.jpg"], [], 1),
    ],
)
def test_a_class_that_is_called_as_a_split_is_told_once_at_most(tmp_path, caplog, files, splits, num_warnings):
    source = open_source(put(tmp_path / "raw", *files), splits=splits)
    assert "train" in source.classes and caplog.text.count("train names a split, and would be a class") == num_warnings


def test_folders_of_the_same_number(tmp_path):
    with pytest.raises(SourceError, match="0 and 00 are the same number: rename one, or type --labels names"):
        open_source(put(tmp_path / "raw", "{00,0,1}/1.jpg"), labels="numbers")


@pytest.mark.parametrize("labels", ["auto", "numbers"])
def test_folders_of_the_same_number_among_others(tmp_path, labels):
    root = put(tmp_path / "raw", "{0,01,1,2}/1.jpg")
    with pytest.raises(SourceError, match="01 and 1 are the same number: rename one, or type --labels names"):
        open_source(root, labels=labels)
    assert open_source(root, labels="names").classes == ["0", "01", "1", "2"]


def test_classes_that_differ_in_case_alone(tmp_path, caplog):
    assert open_source(put(tmp_path / "raw", "{Cat,cat,dog,DOG}/1.jpg")).classes == ["Cat", "DOG", "cat", "dog"]
    assert "classes whose names differ in case alone stay apart: Cat and cat, DOG and dog\n" in caplog.text


@pytest.mark.parametrize("name", ["ILSVRC2012_val_0000000", "test_"])
def test_images_that_are_all_called_as_those_of_val(tmp_path, name):
    root = put(tmp_path / "sorted", f"{{cat,dog}}/{name}{{1,2}}.jpg")
    with pytest.raises(SourceError, match=rf"such as {name}2.jpg, and no folder .*: type --split val=\. if") as caught:
        open_source(root)
    assert advised(str(caught.value)) == [["--split", "val=."]]
    for split in ("train", "val"):
        assert list(open_source(root, splits=[f"{split}=."]).splits) == [split]
    put(root, "dog/3.jpg")
    assert len(open_source(root).splits["train"]) == 5


def test_images_that_are_called_as_those_of_two_splits(tmp_path):
    root = put(tmp_path / "raw", "{cat,dog}/{train,val}_1.jpg")
    why = r"of train and val, such as train_1.jpg and val_1.jpg, and no folder .*: type --split train=\. if all"
    with pytest.raises(SourceError, match=why) as caught:
        open_source(root)
    assert advised(str(caught.value)) == [["--split", "train=."]]
    assert len(open_source(root, splits=["train=."]).splits["train"]) == 4


# Lists beside class folders: where these lie, the lists, and what is read by the advised command; None: there is none.
LISTS = {
    "Food-101": ("images/", {"meta/train.txt": "cat/1\ndog/1\n", "meta/test.txt": "cat/2\n", "meta/all.txt": "cat\n",
                             "meta/train.json": '{"cat": ["cat/1"], "dog": ["dog/1"]}'},
                 {"train": ["cat: images/cat/1", "dog: images/dog/1"], "val": ["cat: images/cat/2"]}),
    "numbers behind": ("", {"train.txt": "cat/1.jpg 0\ndog/1.jpg 1\n", "val.txt": "cat/2.jpg 0\n\n"},
                       {"train": ["cat: cat/1", "dog: dog/1"], "val": ["cat: cat/2"]}),
    "several of one split": ("", {f"labels/{split}{i}.txt": f"cat/{i}.jpg\n" for split in ("train", "test")
                                  for i in (1, 2)}, None),
    "JSON": ("", {"train.json": '{"cat": ["cat/1"], "dog": ["dog/1"]}', "test.json": '["cat/2.jpg"]'}, None),
    "tables": ("", {"splits/train.csv": "path,label\ncat/1.jpg,cat\ndog/1.jpg,dog\n"}, None),
    "CUB": ("images/", {"images.txt": "1 cat/1.jpg\n2 dog/1.jpg\n", "train_test_split.txt": "1 0\n2 1\n"}, None),
    "no folders": ("", {"train.txt": "1.jpg\n", "test.txt": "2.jpg\n"}, None),
}  # fmt: skip


@pytest.mark.parametrize("name", LISTS)
def test_lists_of_splits_beside_class_folders(tmp_path, name):
    place, lists, expected = LISTS[name]
    root = put(tmp_path / "the raw", *(f"{place}{path}.jpg" for path in ("cat/1", "cat/2", "dog/1", "bird/8")))
    for path, text in lists.items():
        (root / path).parent.mkdir(exist_ok=True)
        (root / path).write_text(text)
    with pytest.raises(SourceError, match=r"raw: [^:;]* may say which images are for training; if so, ") as caught:
        open_source(root)
    message = str(caught.value)
    assert advised(message) == [["--split", f"train={place.rstrip('/') or '.'}"]]
    assert len(open_advised(root, advised(message)[0]).splits["train"]) == 4
    command = re.search('give the labels.csv that it writes: (python -c .*?\\)")', message)
    assert (command is None) == (expected is None)
    if command:
        subprocess.run(command[1], shell=True, check=True, timeout=60, cwd=root)
        assert labelled(open_source(root / "labels.csv")) == expected


@pytest.mark.parametrize("files", [
    {"train.log": "cat/1.jpg\n"}, {"train_log.txt": "epoch 1\nread cat/1.jpg\nepoch 2\n"},
    {"images.txt": "cat/1.jpg\n"}, {"train.txt": ""}, {"test.txt": "bird/1.jpg\n"},
    {"train.json": '{"lr": "0.1", "name": "x"}'},
])  # fmt: skip
def test_files_beside_class_folders_that_say_no_splits(tmp_path, files):
    root = put(tmp_path / "raw", "{cat,dog}/1.jpg")
    for path, text in files.items():
        (root / path).write_text(text)
    assert len(open_source(root).splits["train"]) == 2


def test_lists_of_splits_beside_folders_that_say_them(tmp_path):
    for root in (put(tmp_path / "raw", "{train,val}/{cat,dog}/1.jpg"), put(tmp_path / "train", "{cat,dog}/1.jpg")):
        (root / "train.txt").write_text("cat/1.jpg\ndog/1.jpg\n")
        assert len(open_source(root).splits["train"]) == 2


@pytest.mark.parametrize("files", [
    ["{cat,dog}/{train,val}_1.jpg", "dog/2.jpg"], ["rail/train_{1,2}.jpg", "glass/test_{1,2}.jpg"],
    ["{cat,dog}/train_{1,2}.jpg"], ["{cat,dog}/{train_test,val}_1.jpg"],
])  # fmt: skip
def test_images_whose_names_may_say_other_things_than_splits(tmp_path, files):
    assert list(open_source(put(tmp_path / "raw", *files)).splits) == ["train"]


@pytest.mark.parametrize("name", ["val", "imagenet-val", "test", "val/raw", "test/data", "valid/unzipped/images"])
def test_class_folders_in_a_folder_that_is_called_as_a_split(tmp_path, name):
    (tmp_path / name).mkdir(parents=True)
    root = put(tmp_path / name, "{cat,dog}/1.jpg")
    with pytest.raises(SourceError, match=r"nothing in it names a split: type --split val=\. if"):
        open_source(root)
    for split in ("train", "val"):
        assert labelled(open_source(root, splits=[f"{split}=."])) == {split: CAT_AND_DOG}


LEFT_OUT = [
    (["cat/1.webp"], r"1 entry \(not named .jpg, .jpeg, .png\): cat/1.webp"),
    (["cat/{1,2}.txt", "dog/1.csv"], r"3 entries \(not named .*\): cat/1.txt, cat/2.txt, dog/1.csv"),
    (
        ["cat/._1.jpg", "@eaDir/1.jpg", "dog/@eaDir/1.jpg", ".x.tar"],
        r"4 entries \(hidden, or a system's\): .x.tar, @eaDir, cat/._1.jpg, dog/@eaDir",
    ),
    (["labels.csv", "old.zip"], r"2 entries \(beside the class folders\): labels.csv, old.zip"),
    (["cat/{a,b,c,d,e,f,g,h,i,j,k,l}.txt"],
     r"12 entries \(.*\): cat/a.txt, .*, cat/j.txt and 2 others \(--left-out FILE lists all\)"),
]  # fmt: skip


@pytest.mark.parametrize(("files", "message"), LEFT_OUT)
def test_what_is_left_out_is_counted_and_named(tmp_path, caplog, files, message):
    root = put(tmp_path / "raw", "{cat,dog}/1.jpg", *files)
    assert labelled(open_source(root)) == {"train": CAT_AND_DOG}
    line = next(record.getMessage() for record in caplog.records if "left out" in record.msg)
    with pytest.raises(SourceError, match=f"--strict: something of it would be left out: {message}$"):
        open_source(root, strict=True)
    assert line == f"{root}: left out {line.partition('left out ')[2]}" and "left out" in line


def test_what_lies_beside_splits_is_counted(tmp_path, caplog):
    open_source(put(tmp_path / "raw", "{train,val,test}/{cat,dog}/1.jpg", "cover.jpg", "LOC_val.csv"))
    assert "left out 2 entries (beside the folders of splits): LOC_val.csv, cover.jpg\n" in caplog.text
    assert "left out 1 entry (of a test split, and val is taken for val): test" in caplog.text


def test_what_lies_beside_splits_that_are_chosen_is_counted(tmp_path, caplog):
    files = (
        "Data/CLS/{train,val,test}/cat/1.jpg",
        "Data/{notes.txt,README}",
        "{cover.jpg,LICENSE}",
        "{Other,.old}/1.jpg",
    )
    open_source(put(tmp_path / "raw", *files), splits=["train=Data/CLS/train", "val=Data/*/val"])
    assert "left out 4 entries (not named by any --split): Data/CLS/test, Data/notes.txt, Other, cover" in caplog.text
    assert "left out 1 entry (hidden, or a system's): .old\n" in caplog.text


def test_names_of_files_reach_no_terminal_raw(tmp_path, caplog):
    open_source(put(tmp_path / "raw", "cat/1.jpg", "cat/\x1b[2J.txt"))
    assert r"\x1b[2J.txt" in caplog.text and "\x1b" not in caplog.text


def test_links_within_the_source_are_followed(tmp_path, caplog):
    root = put(tmp_path / "raw", ".pool/{2,3}.jpg", "cat/1.jpg", "dog/{3,4,5}.jpg", "dog/1.jpg", "dog/deep/2.jpg")
    (root / "cat" / "day1").symlink_to("../.pool")
    (root / "cat" / "one").symlink_to("day1")
    assert labelled(open_source(root))["train"] == [
        *(f"cat: cat/{name}" for name in ("1", "day1/2", "day1/3", "one/2", "one/3")),
        *(f"dog: dog/{name}" for name in ("1", "3", "4", "5", "deep/2")),
    ]  # fmt: skip
    for place, target in (("dog/deep/up", ".."), ("dog/deep/here", "."), ("dog/all", "../../raw")):
        (root / place).symlink_to(target)
    assert len(open_source(root).splits["train"]) == 10
    assert (
        "left out 3 entries (a link to a folder that it lies in): dog/all, dog/deep/here, dog/deep/up\n" in caplog.text
    )
    (root / "cat" / "out").symlink_to(tmp_path)
    with pytest.raises(SourceError, match="cat: is a link that leads out of the source"):
        open_source(root)


def test_links_in_circles_beside_splits(tmp_path, caplog):
    root = put(tmp_path / "raw", "{train,val}/{cat,dog}/1.jpg")
    (root / "extra").symlink_to("extra")
    assert labelled(open_source(root)) == {"train": CAT_AND_DOG, "val": CAT_AND_DOG}
    root = put(tmp_path / "others", "{cat,dog}/1.jpg")
    for name in "xyz":  # as many paths as there are orders of them, 40 deep
        (root / name).symlink_to(".")
    with pytest.raises(SourceError, match="x/cat, x/dog would be one class, x"):
        open_source(root)


# Links, the files beside them, and the refusal; from "[0-9] image": a warning.
LINKS = {
    "a split": ({"val": "train"}, [], "val: leads to the same folder as .*/train: its images would be .* copy it"),
    "classes": ({"val/cat": "../train/cat", "val/dog": "../train/dog"}, [], "4 images are train's too.* measure"),
    "a class": ({"val/cat": "../train/cat"}, ["val/dog/3.jpg"], "2 images are train's too, by links: .*/val/cat/1.jpg"),
    "a pool": ({"val/cat": "../.pool", "train/dog/more": "../../.pool"}, [".pool/7.jpg", "val/dog/3.jpg"], "1 image"),
    "two classes": ({"train/puppy": "dog"}, ["val/dog/3.jpg"], "is of two classes: .*/train/"),
}  # fmt: skip


@pytest.mark.parametrize("name", LINKS)
def test_links_between_splits_and_classes(tmp_path, caplog, name):
    links, files, message = LINKS[name]
    root = put(tmp_path / "raw", "train/{cat,dog}/{1,2}.jpg", *files)
    for link, target in links.items():
        (root / link).parent.mkdir(parents=True, exist_ok=True)
        (root / link).symlink_to(target)
    if message[0].isdigit() and "measure" not in message:
        open_source(root)
        assert re.search(message, caplog.text)
    else:
        with pytest.raises(SourceError, match=message):
            open_source(root)


def test_folders_within_class_folders_that_have_images(tmp_path, caplog):
    """Masks and thumbnails lie so; a class of folders alone has images nowhere else."""
    open_source(put(tmp_path / "plain", "{cat,dog}/images/1.jpg"))
    assert "within class folders" not in caplog.text
    assert len(open_source(put(tmp_path / "raw", "{cat,dog}/{1,masks/1,old/2}.jpg")).splits["train"]) == 6
    assert (
        "4 images are taken from folders within class folders that have images themselves (masks, old)" in caplog.text
    )


@pytest.mark.parametrize("num_days", [1, 2])
def test_a_class_of_links_alone(tmp_path, caplog, num_days):
    root = put(tmp_path / "raw", "{cat,dog}/1.jpg", ".pool/{2,3,4}.jpg", ".more/5.jpg")
    for target in ("pool", "more")[:num_days]:
        (root / "cat" / target).symlink_to(f"../.{target}")
    assert len(open_source(root).splits["train"]) == (5 if num_days == 1 else 6)
    assert ("cat/more, cat/pool would be one class, cat" in caplog.text) == (num_days == 2)


def test_class_folders_that_are_numbers(tmp_path, caplog):
    root = put(tmp_path / "raw", "{0,1,2,3,4,5,6,7,8,9,10}/1.jpg")
    source = open_source(root)
    assert source.classes[:4] == ["0", "1", "10", "2"] and "the order of their texts: 10 has label 2" in caplog.text
    caplog.clear()
    assert open_source(root, labels="names").classes == source.classes
    by_number = open_source(root, labels="numbers")
    assert by_number.classes == [str(i) for i in range(11)] and not caplog.records
    assert labelled(by_number)["train"] == [f"{i}: {i}/1" for i in range(11)]
    assert by_number.splits["train"].labels.tolist() == [*range(11)]
    put(root, "cat/1.jpg")
    with pytest.raises(SourceError, match="not whole numbers: cat"):
        open_source(root, labels="numbers")
    padded = open_source(put(tmp_path / "padded", "{08,09,10}/1.jpg"))
    assert padded.classes == ["08", "09", "10"] and not caplog.records


def test_classes_without_images_are_counted(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    open_source(put(tmp_path / "raw", "train/{a,b,c,d}/1.jpg", "train/{e,f}/1.txt", "val/a/1.jpg"))
    assert "2 classes of 6 have no images in train: e, f" in caplog.text
    assert "5 classes of 6 have no images in val, which is most of them: b, c, d, e, f" in caplog.text
