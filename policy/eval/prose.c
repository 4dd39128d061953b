/* SPDX-License-Identifier: Apache-2.0 */
#include "policy/eval/prose.h"

#include <ctype.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "engine/random.h"

enum { LIST_MAX = 48 };

/* Letters of a pattern: P person, T thing, A adjective, V what somebody did with a thing, W place, D time, M manner,
 * N weather. Everything else stands for itself. */
static const char *const patterns[] = {
    "D, the P V a A T W.",
    "The P V the A T M, and then went back W.",
    "Nobody W could say why the T was so A.",
    "The T W looked A, although the P had V it only D.",
    "D the N came up again, and the P waited M W.",
    "A A T lay W, next to a T that the P had V.",
    "The P said M that the T was too A for the T.",
    "While the N lasted, the P stayed W and V a T.",
    "It was A W, and the P was glad of the T.",
    "The P and the P talked M about the A T.",
    "D, a A T was found W, and the P V it.",
    "Most of what the P V was A, but the T was not.",
    "There had always been a T W, as A as the N.",
    "The P never V the A T that stood W.",
};

static const char *const persons[LIST_MAX] = {"gardener", "baker", "teacher", "old sailor", "carpenter", "neighbour",
    "librarian", "doctor", "painter", "shepherd", "postman", "clockmaker", "fisherman", "tailor", "musician", "miller",
    "student", "driver", "cook", "weaver", "blacksmith", "nurse", "farmer", "printer"};
static const char *const things[LIST_MAX] = {"lamp", "wooden boat", "basket", "letter", "kettle", "garden wall",
    "blanket", "map", "bicycle", "teapot", "violin", "ladder", "chair", "coat", "bridge", "stove", "mirror", "bucket",
    "picture", "window", "cart", "pair of boots", "loaf of bread", "rope", "candle", "notebook", "fence", "drum",
    "apple tree", "hammer", "curtain", "stone", "bell", "shelf"};
static const char *const adjectives[LIST_MAX] = {"quiet", "heavy", "bright", "dusty", "narrow", "green", "ordinary",
    "crooked", "warm", "forgotten", "simple", "faded", "cheerful", "cold", "smooth", "strange", "broken", "gentle",
    "yellow", "ancient", "useful", "empty", "careful", "plain", "soft", "grey", "lovely", "rough", "tall", "small"};
static const char *const verbs[LIST_MAX] = {"repaired", "carried", "cleaned", "sold", "noticed", "borrowed", "painted",
    "moved", "watched", "described", "wrapped", "lost", "admired", "measured", "kept", "returned", "sketched", "bought",
    "stored", "remembered", "polished", "lifted", "opened", "counted"};
static const char *const places[LIST_MAX] = {"by the river", "at the market", "behind the house", "on the hill",
    "near the harbour", "in the kitchen", "under the old bridge", "along the road", "in the village square",
    "at the edge of the forest", "beside the mill", "in the attic", "on the small island", "across the field",
    "outside the school", "at the station", "in the workshop", "below the tower", "in the garden", "at the corner"};
static const char *const times[LIST_MAX] = {"in the morning", "late in the evening", "some days before",
    "on a rainy afternoon", "after the holidays", "early in spring", "once a week", "before breakfast",
    "at the end of summer", "during the night", "shortly after noon", "on the way home", "last winter",
    "when the bells rang", "a long time ago", "now and then"};
static const char *const manners[LIST_MAX] = {"slowly", "without a word", "with great care", "happily", "in a hurry",
    "as usual", "quite calmly", "with a smile", "for a while", "rather loudly", "patiently", "almost in secret"};
static const char *const weathers[LIST_MAX] = {
    "wind", "rain", "fog", "snow", "sunshine", "frost", "storm", "heat", "drizzle", "mist"};

static const char *const *list_of(char letter) {
    switch (letter) {
    case 'P':
        return persons;
    case 'T':
        return things;
    case 'A':
        return adjectives;
    case 'V':
        return verbs;
    case 'W':
        return places;
    case 'D':
        return times;
    case 'M':
        return manners;
    case 'N':
        return weathers;
    default:
        return NULL;
    }
}

/* A letter that stands alone is a slot of the pattern, except the article that begins a sentence ("A A T"). */
static bool is_slot(const char *pattern, size_t at) {
    if (list_of(pattern[at]) == NULL || isalpha((unsigned char)pattern[at + 1]) ||
        (at > 0 && isalpha((unsigned char)pattern[at - 1])))
        return false;
    return !(at == 0 && pattern[0] == 'A');
}

static uint32_t list_length(const char *const *list) {
    uint32_t count = 0;
    while (count < LIST_MAX && list[count] != NULL)
        count++;
    return count;
}

/* "a ordinary" -> "an ordinary": whether the text ends in the article and the word begins with a vowel. */
static bool needs_n(const char *text, size_t length, const char *word) {
    bool article = length >= 2 && text[length - 1] == ' ' && tolower((unsigned char)text[length - 2]) == 'a' &&
                   (length == 2 || text[length - 3] == ' ');
    return article && strchr("aeiou", word[0]) != NULL;
}

size_t prose_sentence(uint64_t seed, uint32_t stream, uint32_t index, char out[static PROSE_SENTENCE_MAX]) {
    uint32_t words[4];
    random_philox(seed, stream, index, 0, words);
    const char *pattern = patterns[words[0] % (sizeof patterns / sizeof patterns[0])];
    size_t length = 0;
    for (size_t i = 0; pattern[i] != '\0'; i++) {
        if (!is_slot(pattern, i)) {
            out[length++] = pattern[i];
            continue;
        }
        const char *const *list = list_of(pattern[i]);
        random_philox(seed, stream, index, i + 1, words);
        const char *word = list[words[0] % list_length(list)];
        if (needs_n(out, length, word))
            length = length - 1 + (size_t)sprintf(out + length - 1, "n ");
        length += (size_t)sprintf(out + length, "%s", word);
    }
    out[0] = (char)toupper((unsigned char)out[0]);
    out[length] = '\0';
    return length;
}
