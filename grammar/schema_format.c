/* SPDX-License-Identifier: Apache-2.0
 *
 * Formats of strings as patterns: RFC 3339 (dates and times, of the calendar, without leap seconds), RFC 4122 (uuid),
 * RFC 2673 and 4291 (addresses), RFC 1123 (host names). What is written is part of what a format allows: e-mail
 * addresses are dot-atoms at a host name, durations (ISO 8601) have whole numbers.
 */
#include "grammar/schema.h"

#include <string.h>

#define DAYS_31 "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
#define DAYS_30 "(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
#define DAYS_28 "02-(?:0[1-9]|1[0-9]|2[0-8])"
#define YEAR "(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
#define LEAP_YEAR "(?:[0-9][0-9](?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
#define DATE "(?:" YEAR "-(?:" DAYS_31 "|" DAYS_30 "|" DAYS_28 ")|" LEAP_YEAR "-02-29)"
#define HOUR_MINUTE "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
#define TIME HOUR_MINUTE ":[0-5][0-9](?:\\.[0-9]{1,6})?(?:Z|[+-]" HOUR_MINUTE ")"
#define BYTE "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
#define LABEL "[a-z0-9](?:[a-z0-9-]{0,30}[a-z0-9])?"
#define HOST LABEL "(?:\\." LABEL "){0,3}"
#define HEX4 "[0-9a-f]{1,4}"
#define ADDRESS_END(count) "(?::" HEX4 "){1," count "}"

const char *schema_format(const char *name) {
    static const struct {
        const char *name, *pattern;
    } formats[] = {
        {"date", "^" DATE "$"},
        {"time", "^" TIME "$"},
        {"date-time", "^" DATE "T" TIME "$"},
        {"duration", "^P(?:[0-9]{1,4}D(?:T[0-9]{1,4}H)?|T[0-9]{1,4}[HMS]|[0-9]{1,4}[WMY])$"},
        {"uuid", "^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$"},
        {"email", "^[a-z0-9_+-]{1,20}(?:\\.[a-z0-9_+-]{1,20}){0,2}@" HOST "$"},
        {"hostname", "^" HOST "$"},
        {"ipv4", "^" BYTE "(?:\\." BYTE "){3}$"},
        {"ipv6",
            "^(?:(?:" HEX4 ":){7}" HEX4 "|:(?:" ADDRESS_END("7") "|:)|" HEX4 ":" ADDRESS_END(
                "6") "|(?:" HEX4
                     ":){2}" ADDRESS_END("5") "|(?:" HEX4 ":){3}" ADDRESS_END("4") "|(?:" HEX4 ":){4}" ADDRESS_END(
                         "3") "|(?:" HEX4 ":){5}" ADDRESS_END("2") "|(?:" HEX4 ":){6}:" HEX4 "|(?:" HEX4 ":){1,7}:)$"},
    };
    for (size_t i = 0; i < sizeof formats / sizeof formats[0]; i++)
        if (strcmp(formats[i].name, name) == 0)
            return formats[i].pattern;
    return NULL;
}
