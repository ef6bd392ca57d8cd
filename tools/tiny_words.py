"""Words and sentences for generated text: six languages in five scripts, emoji, and invented names.

Every choice comes from the `random.Random` that is passed in, so that a seed gives the same text on every machine.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from random import Random

HELD_SHARE = 8  # one in this many names, sums, calls, ... is kept out of training
EMOJI = ("🌊", "🌲", "🍎", "🐟", "🔔", "🎈", "🚲", "☕", "🌙", "🐢", "🎻", "🔑", "🌻", "❄", "🚀", "🦊")
# 24 syllables each: 13,824 names, most of which no training text ever holds twice.
FIRST = ("Ma", "To", "Li", "Ka", "Re", "Sa", "Do", "Ni", "Be", "Fa", "Ju", "Hel", "Vi", "Ro", "Ze", "Pa", "Lu",
         "Gri", "Ty", "Or", "Wen", "Ce", "Da", "Mi")
SECOND = ("ra", "ve", "lo", "mi", "shi", "da", "ne", "ko", "ri", "ta", "lu", "fe", "go", "na", "be", "zo",
          "ka", "pi", "tu", "su", "le", "ja", "wo", "xi")
THIRD = ("lin", "nor", "sa", "vik", "dan", "mar", "tel", "rim", "nia", "ken", "bas", "dor", "la", "mus", "ret",
         "gan", "vo", "tis", "bel", "fur", "nes", "kip", "rad", "zon")


@dataclass(frozen=True)
class Language:
    """Phrases that fit together in any combination, sentence patterns over them, and how a code is told and asked."""

    subjects: tuple[str, ...]
    verbs: tuple[str, ...]
    objects: tuple[str, ...]
    places: tuple[str, ...]
    times: tuple[str, ...]
    patterns: tuple[str, ...]
    statement: str
    question: str


def _phrases(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split("|"))


_SPACED = ("{s} {v} {o} {p}.", "{t}, {s} {v} {o}.", "{s} {v} {o} {t}.", "{p} {s} {v} {o}.", "{s} {v} {o}.")

LANGUAGES = {
    "en": Language(
        _phrases("the old sailor|a young teacher|the baker|our neighbour|the gardener|a quiet child|the doctor|the miller"
                 "|a tired painter|the captain|her brother|the night watch|a small dog|the white horse|the north wind"),
        _phrases("watches|carries|remembers|paints|follows|finds|repairs|counts|sells|hides|draws|cleans"),
        _phrases("a wooden boat|the red lamp|an empty basket|the long letter|a stone bridge|two silver coins|the blue door"
                 "|a map of the coast|the morning bread|some dry leaves|the broken clock|a warm coat|the tall ladder"
                 "|an old song|the last apple|a bag of salt"),
        _phrases("near the harbour|under the roof|behind the mill|by the lake|in the market|at the station|on the hill"
                 "|across the street|inside the tower|along the road|in the garden|beside the church"),
        _phrases("every morning|at noon|in winter|after the rain|before dawn|on Sunday|late at night|all summer"),
        (*_SPACED, "In {year}, {s} {v} {o}.", "{s} {v} {o} {p} {t}."),
        "The code of {name} is {code}.", "What is the code of {name}?"),
    "es": Language(
        _phrases("el viejo marinero|la joven maestra|el panadero|nuestro vecino|la jardinera|un niño tranquilo|la doctora"
                 "|el molinero|una pintora cansada|el capitán|su hermano|el caballo blanco"),
        _phrases("mira|lleva|recuerda|pinta|encuentra|arregla|cuenta|vende|esconde|limpia"),
        _phrases("una barca de madera|la lámpara roja|un cesto vacío|la carta larga|un puente de piedra|la puerta azul"
                 "|un mapa de la costa|el pan caliente|las hojas secas|el reloj roto|un abrigo|la última manzana"),
        _phrases("cerca del puerto|bajo el tejado|detrás del molino|junto al lago|en el mercado|en la estación"
                 "|en la colina|en el jardín|en la torre"),
        _phrases("cada mañana|a mediodía|en invierno|después de la lluvia|antes del alba|el domingo|muy de noche"),
        _SPACED, "El código de {name} es {code}.", "¿Cuál es el código de {name}?"),
    "ru": Language(
        _phrases("старый моряк|молодой учитель|пекарь|наш сосед|садовник|тихий ребёнок|врач|мельник|усталый художник"
                 "|капитан|её брат|белый конь"),
        _phrases("видит|несёт|помнит|рисует|находит|чинит|считает|продаёт|прячет|моет"),
        _phrases("деревянную лодку|красную лампу|пустую корзину|длинное письмо|каменный мост|синюю дверь|карту берега"
                 "|свежий хлеб|сухие листья|старые часы|тёплое пальто|последнее яблоко"),
        _phrases("у гавани|под крышей|за мельницей|у озера|на рынке|на станции|на холме|в саду|в башне|вдоль дороги"),
        _phrases("каждое утро|в полдень|зимой|после дождя|на рассвете|в воскресенье|поздно ночью"),
        _SPACED, "Код для {name} это {code}.", "Какой код для {name}?"),
    "el": Language(
        _phrases("ο γέρος ναύτης|ο νέος δάσκαλος|ο φούρναρης|ο γείτονας|ο κηπουρός|το ήσυχο παιδί|ο γιατρός|ο μυλωνάς"
                 "|ο ζωγράφος|ο καπετάνιος|ο αδελφός της|το άσπρο άλογο"),
        _phrases("βλέπει|κρατάει|θυμάται|ζωγραφίζει|βρίσκει|φτιάχνει|μετράει|πουλάει|κρύβει|πλένει"),
        _phrases("μια ξύλινη βάρκα|την κόκκινη λάμπα|ένα άδειο καλάθι|το μεγάλο γράμμα|τη γέφυρα|τη γαλάζια πόρτα"
                 "|έναν χάρτη|το ζεστό ψωμί|τα ξερά φύλλα|το παλιό ρολόι|ένα παλτό|το τελευταίο μήλο"),
        _phrases("κοντά στο λιμάνι|κάτω από τη στέγη|πίσω από τον μύλο|δίπλα στη λίμνη|στην αγορά|στον σταθμό|στον λόφο"
                 "|στον κήπο|στον πύργο"),
        _phrases("κάθε πρωί|το μεσημέρι|τον χειμώνα|μετά τη βροχή|την αυγή|την Κυριακή|αργά τη νύχτα"),
        _SPACED, "Ο κωδικός του {name} είναι {code}.", "Ποιος είναι ο κωδικός του {name};"),
    "zh": Language(
        _phrases("老水手|年轻的老师|面包师|我们的邻居|园丁|安静的孩子|医生|磨坊主|疲倦的画家|船长|她的弟弟|白马"),
        _phrases("看着|带着|记得|画着|找到|修好|数着|卖掉|藏起|擦洗"),
        _phrases("一条木船|红灯|空篮子|长信|石桥|蓝色的门|海岸的地图|热面包|干树叶|旧钟|厚大衣|最后的苹果"),
        _phrases("在港口旁边|在屋顶下|在磨坊后面|在湖边|在市场|在车站|在山上|在花园里|在塔里"),
        _phrases("每天早上|中午|冬天|雨后|天亮前|星期天|深夜"),
        ("{t}，{s}{p}{v}{o}。", "{s}{v}{o}。", "{s}{p}{v}{o}。"), "代码 {name} 是 {code}。", "代码 {name} 是什么？"),
    "ar": Language(
        _phrases("البحار القديم|المعلم الشاب|الخباز|جارنا|البستاني|الطفل الهادئ|الطبيب|الطحان|الرسام|القبطان|أخوها"
                 "|الحصان الأبيض"),
        _phrases("يرى|يحمل|يتذكر|يرسم|يجد|يصلح|يعد|يبيع|يخفي|ينظف"),
        _phrases("قاربا خشبيا|المصباح الأحمر|سلة فارغة|الرسالة الطويلة|جسرا|الباب الأزرق|خريطة الساحل|الخبز الساخن"
                 "|الأوراق الجافة|الساعة القديمة|معطفا|التفاحة الأخيرة"),
        _phrases("قرب الميناء|تحت السقف|خلف الطاحونة|عند البحيرة|في السوق|في المحطة|على التل|في الحديقة|في البرج"),
        _phrases("كل صباح|في الظهر|في الشتاء|بعد المطر|قبل الفجر|يوم الأحد|في الليل"),
        ("{s} {v} {o} {p}.", "{s} {v} {o} {t}.", "{s} {v} {o}."), "رمز {name} هو {code}.", "ما هو رمز {name}؟"),
}
MIX = ("en",) * 6 + ("es", "ru", "el", "zh", "ar")


def held_out(key: str) -> bool:
    """Whether `key` belongs to the part that training never sees: a hash, the same on every machine."""
    return zlib.crc32(key.encode()) % HELD_SHARE == 0


def name(rng: Random, held: bool) -> str:
    """An invented name of three syllables, from the held-out part or from the other."""
    while True:
        drawn = rng.choice(FIRST) + rng.choice(SECOND) + rng.choice(THIRD)
        if held_out(drawn) == held:
            return drawn


def names(rng: Random, held: bool, count: int) -> list[str]:
    """`count` different names."""
    drawn: dict[str, None] = {}
    while len(drawn) < count:
        drawn[name(rng, held)] = None
    return list(drawn)


def code(rng: Random) -> str:
    """Five digits, leading zeros included."""
    return f"{rng.randrange(100000):05d}"


def sentence(rng: Random, language: str | None = None) -> str:
    """One sentence, in `language` or in one drawn from MIX; now and then an emoji follows it."""
    chosen = LANGUAGES[language or rng.choice(MIX)]
    parts = {"s": chosen.subjects, "v": chosen.verbs, "o": chosen.objects, "p": chosen.places, "t": chosen.times}
    text = rng.choice(chosen.patterns).format(
        year=rng.randrange(1500, 2050), **{key: rng.choice(phrases) for key, phrases in parts.items()})
    text = text[0].upper() + text[1:]
    return f"{text} {rng.choice(EMOJI)}" if rng.random() < 0.05 else text


def words(rng: Random, count: int, language: str | None = None) -> list[str]:
    """`count` words of phrases of one language, or of a language drawn for each word."""
    drawn = []
    for _ in range(count):
        chosen = LANGUAGES[language or rng.choice(MIX)]
        phrase = rng.choice(rng.choice((chosen.subjects, chosen.verbs, chosen.objects, chosen.places)))
        drawn.append(rng.choice(phrase.split()))
    return drawn
