/* SPDX-License-Identifier: Apache-2.0
 *
 * The tables. Times are in microseconds of Unix time. Who reads and writes which: records.h.
 *
 * A change of this script is a new SCHEMA_VERSION, and database_prepare_schema brings older files up to it.
 */
#ifndef STORE_SCHEMA_H
#define STORE_SCHEMA_H

enum { SCHEMA_VERSION = 1, SCHEMA_APPLICATION = 0x44434c43 };

extern const char schema_script[];

#endif
